"""The recipes for Accelerate and Lightning, with the real packages, on two ranks."""

import contextlib
import importlib.util
import io
import itertools
import os
import re
import socket
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

import gradtx as gx
from ranks import gloo_ranks, outcome

EXAMPLES = Path(__file__).parent.parent / "examples"
TX = gx.chain(gx.skip_bn(), gx.topk(0.01), gx.ef(), gx.allreduce())
PRINTED = re.compile(r"accuracy ([\d.]+)%, (\d+) bytes sent, dense (\d+)\n")
# What Lightning itself says on import and use; the rest only where there are many cores or a GPU.
_OWN_WARNINGS = (
    r"`isinstance\(treespec, LeafSpec\)` is deprecated, use "
    r"`isinstance\(treespec, TreeSpec\) and treespec.is_leaf\(\)` instead\.$",
    r"The 'train_dataloader' does not have many workers which may be a bottleneck\. Consider "
    r"increasing the value of the `num_workers` argument` to `num_workers=\d+` in the `DataLoader` "
    r"to improve performance\.$",
    r"The 'val_dataloader' does not have many workers which may be a bottleneck\. Consider "
    r"increasing the value of the `num_workers` argument` to `num_workers=\d+` in the `DataLoader` "
    r"to improve performance\.$",
    r"GPU available but not used\. You can set it by doing `Trainer\(accelerator='gpu'\)`\.$",
)


def example(name):
    """An example as a module."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def no_network(*args, **kwargs):
    raise AssertionError(f"the network is asked for {args}")


@contextlib.contextmanager
def launched(rank):
    """As torchrun starts a rank; its process group is there already, and stays."""
    torchrun = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "test",
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, torchrun))
        stack.enter_context(mock.patch.object(socket, "getaddrinfo", no_network))
        stack.enter_context(mock.patch.object(socket.socket, "connect", no_network))
        for message in _OWN_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        yield


class Bad:
    """A loss that is infinite on rank 1 in one call."""

    def __init__(self, rank, call):
        self.rank, self.call, self.calls = rank, call, 0

    def __call__(self, outputs, labels):
        self.calls += 1
        loss = cross_entropy(outputs, labels)
        return loss * torch.inf if (self.rank, self.calls) == (1, self.call) else loss


def printed(main, *arguments):
    """What a main function returns and prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        returned = main(list(arguments))
    return returned, out.getvalue()


def parameters(model):
    return [p.detach().clone() for p in model.parameters()]


def plain(model, epochs, loss, after_step=None, after_epoch=None):
    """A loop with a Pipeline: windows of two micro-batches, the last of an epoch with one."""
    pipe = gx.Pipeline(TX, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.995 if after_step else 0.8)
    skipped = 0
    for batches in epochs:
        for i, (images, labels) in enumerate(batches):
            (loss(model(images), labels) / 2).backward()
            if i % 2 == 0 and i + 1 < len(batches):
                continue
            report = pipe.sync(optimizer)
            skipped += report.skipped
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if report.ready:
                optimizer.step()
            optimizer.zero_grad()
            for _ in range(after_step or 0):
                schedule.step()
        for _ in range(after_epoch or 0):
            schedule.step()
    return parameters(model), skipped


def _accelerate(rank, folder):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, set_seed

    loop = example("accelerate_loop")
    found = {}

    def run(*arguments, bad=0):
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        with mock.patch.object(loop.F, "cross_entropy", Bad(rank, bad)):
            model, out = printed(loop.main, *arguments)
        return parameters(model), out

    def fresh(**options):
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        return Accelerator(cpu=True, **options)

    def prepared(accelerator):
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return accelerator.prepare(model, optimizer)

    with launched(rank), mock.patch.object(PartialState, "destroy_process_group"):
        short = ("--accumulate", "2")
        found["whole"], found["printed"] = run("--epochs", "2", *short, bad=5)
        run("--epochs", "1", *short, "--save", folder, bad=5)
        found["resumed"] = run("--epochs", "2", *short, "--resume", folder)[0]

        set_seed(0)
        seedable = DataLoaderConfiguration(use_seedable_sampler=True)
        accelerator = fresh(dataloader_config=seedable)
        model, loader = loop.network(), accelerator.prepare(loop.loaders()[0])
        epochs = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            epochs.append(list(loader))
        found["plain"], found["skipped"] = plain(model, epochs, Bad(rank, 5), after_step=2)

        # As on a GPU, where mixed_precision="fp16" has a scaler.
        accelerator = fresh()
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        accelerator.native_amp = True
        accelerator.state._mixed_precision = "fp16"
        model, optimizer = prepared(accelerator)
        hook = loop.compressed(accelerator, model)
        found["fp16"] = []
        for bad in (False, True, False):
            before = parameters(model)
            accelerator.backward(model(torch.ones(2, 3)).sum() * (torch.inf if bad and rank else 1))
            norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad()
            moved = not all(map(torch.equal, before, parameters(model)))
            skipped = hook.report.skipped, optimizer.step_was_skipped
            scale = accelerator.scaler.get_scale()
            found["fp16"].append((moved, *skipped, scale, round(norm.item(), 3)))

        accelerator = fresh()
        model, _ = prepared(accelerator)
        hook = loop.compressed(accelerator, model)
        accelerator.register_for_checkpointing(hook)
        accelerator.save_state(f"{folder}/registered")
        accelerator.wait_for_everyone()
        found["registered"] = outcome(accelerator.load_state, f"{folder}/registered")

        plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
        accelerator = fresh(gradient_accumulation_plugin=plugin)
        model, optimizer = prepared(accelerator)
        loop.compressed(accelerator, model)

        def two_micro_steps():
            for _ in range(2):
                with accelerator.accumulate(model):
                    accelerator.backward(model(torch.ones(2, 3)).sum())
                    optimizer.step()
                    optimizer.zero_grad()

        found["every"] = outcome(two_micro_steps)
    return found


def check_trained(out):
    accuracy, sent, dense = map(float, PRINTED.fullmatch(out).groups())
    # After twenty steps; 98 % after 5 epochs without windows.
    assert accuracy > 75
    assert 0 < 50 * sent < dense


def check_same(first, second):
    assert all(map(torch.equal, first, second))


@pytest.fixture(scope="module")
def accelerated(tmp_path_factory):
    return gloo_ranks(2, _accelerate, str(tmp_path_factory.mktemp("accelerate")))


class TestAccelerate:
    def test_it_learns_from_a_fiftieth_of_the_bytes(self, accelerated):
        check_trained(accelerated[0]["printed"])
        assert accelerated[1]["printed"] == ""

    def test_replicas_are_equal(self, accelerated):
        check_same(accelerated[0]["whole"], accelerated[1]["whole"])

    def test_windows_and_a_bad_step_give_what_a_loop_with_a_pipeline_gives(self, accelerated):
        for found in accelerated:
            assert found["skipped"] == 1
            check_same(found["whole"], found["plain"])

    def test_it_goes_on_from_a_checkpoint_as_if_nothing_had_happened(self, accelerated):
        for found in accelerated:
            check_same(found["whole"], found["resumed"])

    def test_with_a_scaler_all_ranks_skip_a_bad_step_and_norms_are_true(self, accelerated):
        good, bad, good_again = accelerated[0]["fp16"]
        assert accelerated[1]["fp16"] == accelerated[0]["fp16"]
        assert good[:4] == (True, False, False, 8.0)
        assert bad[:4] == (False, True, True, 4.0)
        assert good_again[:4] == (True, False, False, 4.0)
        # topk keeps one weight, of gradient 2, and the bias.
        assert good[4] == pytest.approx(8**0.5, abs=0.01)

    def test_a_registered_hook_is_refused_on_other_ranks_as_it_is_the_state_of_rank_0(
        self, accelerated
    ):
        assert accelerated[0]["registered"] == "fine"
        assert accelerated[1]["registered"] == (
            "ValueError",
            "this state_dict has rank 0: expected 1",
        )

    def test_exchanging_in_each_micro_step_is_refused(self, accelerated):
        for found in accelerated:
            kind, text = found["every"]
            assert kind in ("RuntimeError", "RankMismatchError")
            assert "which would be exchanged again" in text


def _lightning(rank, folder):
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.strategies import DDPStrategy

    found = {}
    with launched(rank):
        loop = example("lightning_loop")

        def run(*arguments, bad=0):
            with mock.patch.object(loop.F, "cross_entropy", Bad(rank, bad)):
                trainer, out = printed(loop.main, *arguments)
            return parameters(trainer.lightning_module), out

        short = ("--accumulate", "2")
        found["whole"], found["printed"] = run("--epochs", "2", *short, bad=5)
        run("--epochs", "1", *short, "--save", f"{folder}/last.ckpt", bad=5)
        found["resumed"] = run("--epochs", "2", *short, "--resume", f"{folder}/last.ckpt")[0]

        L.seed_everything(0, verbose=False)
        module, loader = loop.Classifier(), loop.loaders()[0]
        sampler = DistributedSampler(loader.dataset, 2, rank, shuffle=True)
        shard = DataLoader(loader.dataset, loader.batch_size, sampler=sampler, drop_last=True)
        epochs = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            epochs.append(list(shard))
        found["plain"], found["skipped"] = plain(
            module.network, epochs, Bad(rank, 5), after_epoch=1
        )

        class Small(L.LightningModule):
            """A layer, fitted in four steps, the second of them bad on rank 1."""

            def __init__(self, bad=1):
                super().__init__()
                self.layer, self.bad = torch.nn.Linear(3, 1), bad
                self.seen, self.scales = [], []

            def training_step(self, batch, index):
                self.seen.append(self.layer.weight.detach().clone())
                bad = rank and index == self.bad
                return self.layer(batch).sum() * (torch.inf if bad else 1)

            def on_train_batch_end(self, outputs, batch, index):
                scaler = getattr(self.trainer.strategy, "scaler", None)
                self.scales.append(scaler and scaler.get_scale())

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)

        def fitted(model, tx=TX, options=None, **trainer_options):
            defaults = {
                "strategy": loop.CompressedDDP(tx, **(options or {})),
                "enable_checkpointing": False,
            }
            trainer = L.Trainer(
                accelerator="cpu",
                devices=2,
                max_epochs=1,
                enable_model_summary=False,
                enable_progress_bar=False,
                logger=False,
                **(defaults | trainer_options),
            )
            trainer.fit(model, DataLoader(torch.ones(16, 3), 2))
            return trainer

        half = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))
        model = Small()
        trainer = fitted(model, gx.chain(gx.unscale(), TX), plugins=half)
        moved = [not torch.equal(*pair) for pair in itertools.pairwise(model.seen)]
        found["fp16"] = moved, model.scales, trainer.strategy.hook.report.skipped

        keep_one = ModelCheckpoint(f"{folder}/kept", every_n_train_steps=1, save_top_k=1)
        fitted(Small(), enable_checkpointing=True, callbacks=[keep_one])
        torch.distributed.barrier()  # Each rank removes its own.
        found["kept"] = sorted(path.name for path in Path(folder, "kept").iterdir())

        static = {"static_graph": True}
        found["static"] = outcome(fitted, Small(), options=static, accumulate_grad_batches=2)

        called = []
        strategy = DDPStrategy(ddp_comm_hook=lambda state, bucket: called.append(bucket))
        fitted(Small(), strategy=strategy)
        found["called"] = called
    return found


@pytest.fixture(scope="module")
def lightened(tmp_path_factory):
    return gloo_ranks(2, _lightning, str(tmp_path_factory.mktemp("lightning")))


class TestLightning:
    def test_it_learns_from_a_fiftieth_of_the_bytes(self, lightened):
        check_trained(lightened[0]["printed"])
        assert lightened[1]["printed"] == ""

    def test_replicas_are_equal(self, lightened):
        check_same(lightened[0]["whole"], lightened[1]["whole"])

    def test_windows_and_a_bad_step_give_what_a_loop_with_a_pipeline_gives(self, lightened):
        for found in lightened:
            assert found["skipped"] == 1
            check_same(found["whole"], found["plain"])

    def test_it_goes_on_from_a_checkpoint_as_if_nothing_had_happened(self, lightened):
        for found in lightened:
            check_same(found["whole"], found["resumed"])

    def test_with_a_scaler_all_ranks_skip_a_bad_step(self, lightened):
        for found in lightened:
            moved, scales, skipped = found["fp16"]
            assert moved == [True, False, True]
            assert scales == [8.0, 4.0, 4.0, 4.0]
            assert not skipped

    def test_the_states_of_all_ranks_go_with_their_checkpoint(self, lightened):
        name = "epoch=0-step=4.ckpt"
        for found in lightened:
            assert found["kept"] == [name, f"{name}.rank0", f"{name}.rank1"]

    def test_a_static_graph_that_begins_within_a_window_is_refused(self, lightened):
        for found in lightened:
            kind, text = found["static"]
            assert kind == "RuntimeError"
            assert "the first step of DDP(static_graph=True) is inside no_sync()" in text

    def test_a_hook_given_to_lightnings_own_strategy_is_never_called_on_a_cpu(self, lightened):
        assert lightened[0]["called"] == lightened[1]["called"] == []
