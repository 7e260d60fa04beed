"""``python -m gradtx``: demo, measurements, rules and chains explained, states resharded."""

from __future__ import annotations

import argparse
import sys

import gradtx
from gradtx.core.errors import ChainOrderError
from gradtx.core.explain import explain, rules_table
from gradtx.core.parse import FAILURES, parse


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: without the program's name; by default those of the process.

    Returns:
        The exit status: 0; 1 for a chain that is refused; 2 for unusable arguments.
    """
    parser = argparse.ArgumentParser("python -m gradtx", description=gradtx.__doc__.split("\n")[0])
    parser.add_argument("--version", action="version", version=gradtx.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_explain(commands.add_parser("explain", help="print the order rules, or explain a chain"))
    from gradtx import demo, state_files
    from gradtx.bench import collectives, compressors, convergence, soak, sync
    from gradtx.plan import simulate

    demo.add_arguments(commands.add_parser("demo", help="train on two ranks, dense and compressed"))
    compressors.add_arguments(
        commands.add_parser("compressors", help="measure all compressors on a gradient")
    )
    simulate.add_arguments(
        commands.add_parser("plan", help="predict what exchanges send on many ranks, and how fast")
    )
    state_files.add_arguments(
        commands.add_parser("reshard", help="make states for another number of ranks of saved ones")
    )
    bench = commands.add_parser("bench", help="measure more, which takes longer")
    benches = bench.add_subparsers(dest="bench", required=True)
    convergence.add_arguments(
        benches.add_parser("convergence", help="train small networks with many chains")
    )
    sync.add_arguments(
        benches.add_parser("sync", help="time the synchronisation of a gradient, beside peers")
    )
    collectives.add_arguments(
        benches.add_parser("link", help="measure latency and bandwidth between ranks")
    )
    soak.add_arguments(
        benches.add_parser("soak", help="train through faults and restarts, and check the laws")
    )
    options = parser.parse_args(arguments)
    if options.command == "explain":
        return _explain(options.chain)
    if options.command == "compressors":
        return compressors.main(options)
    if options.command == "plan":
        return simulate.main(options)
    if options.command == "reshard":
        return state_files.main(options)
    if options.command == "bench":
        mains = {
            "convergence": convergence.main,
            "sync": sync.main,
            "link": collectives.main,
            "soak": soak.main,
        }
        return mains[options.bench](options)
    return demo.main(options)


def _add_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "chain", nargs="?", help='such as "chain(unscale(), topk(0.01), ef(), allreduce())"'
    )


def _explain(text: str | None) -> int:
    if text is None:
        print(rules_table())
        return 0
    names = {name: getattr(gradtx, name) for name in gradtx.__all__}
    try:
        print(explain(parse(text, names)))
    except ChainOrderError as error:
        print(error)
        return 1
    except FAILURES as error:
        print(f"gradtx explain: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
