"""Digits on a mesh of devices: a JAX loop with an optax optimizer, dense and compressed.

    pip install 'gradtx[jax,demo]'
    python examples/jax_mesh.py

Without accelerators it runs on four devices that are all this CPU.
"""

import argparse
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import gradtx as gx
from gradtx.bench.hlo import collective_bytes

P = jax.sharding.PartitionSpec
BATCH = 64


def initial(key):
    """Three layers: 64 to 256 to 256 to 10."""
    sizes = [64, 256, 256, 10]
    keys = jax.random.split(key, len(sizes))
    return [
        {"w": jax.random.normal(k, (n, m)) * (2 / n) ** 0.5, "b": jnp.zeros(m)}
        for k, n, m in zip(keys, sizes[:-1], sizes[1:], strict=False)
    ]


def logits(params, x):
    """The network."""
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def loss(params, x, y):
    """Mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()


def train(tx, mesh, data, epochs):
    """Returns the parameters, and what one device puts into the collectives of a step."""
    x, y = data
    params = initial(jax.random.key(0))
    # What differs between devices, such as residuals, is laid out along the axis.
    specs = gx.partition_specs(jax.eval_shape(tx.init, params), axis_name="data")
    state = jax.jit(jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs))(params)

    def step(params, state, x, y):
        # The gradient of this device's images: with respect to parameters that are the same on
        # all devices, jax.grad would sum it over them, uncompressed.
        own = jax.lax.pcast(params, "data", to="varying")
        grads = jax.grad(loss)(own, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P(), specs, P("data"), P("data")),
            out_specs=(P(), specs),
        ),
        donate_argnums=(0, 1),
    )
    params = jax.device_put(params, jax.NamedSharding(mesh, P()))
    batches = jax.NamedSharding(mesh, P("data"))
    sent = None
    for epoch in range(epochs):
        order = jax.random.permutation(jax.random.key(epoch), len(x))
        for start in range(0, len(x) - BATCH + 1, BATCH):
            rows = order[start : start + BATCH]
            batch = jax.device_put((x[rows], y[rows]), batches)
            if sent is None:
                compiled = step.lower(params, state, *batch).compile()
                sent = collective_bytes(compiled.as_text(), mesh.size)
            params, state = step(params, state, *batch)
    return params, sent


def on_the_link(sent, devices):
    """Bytes that one device sends in a step: gathers copied to all others, sums in a ring."""
    gathered = (devices - 1) * sent.get("all-gather", 0)
    return gathered + 2 * (devices - 1) / devices * sent.get("all-reduce", 0)


def main():
    """Trains twice, and prints both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40)
    epochs = parser.parse_args().epochs

    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, test_size=0.3, random_state=0)
    x, x_held_out, y, y_held_out = (jnp.asarray(part) for part in split)
    x, x_held_out = x.astype(jnp.float32), x_held_out.astype(jnp.float32)

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    optimizer = optax.adamw(2e-3)
    chains = {
        "dense": gx.chain(gx.allreduce(axis_name="data"), optimizer),
        "compressed": gx.chain(
            gx.filter_params(gx.is_matrix),
            gx.topk(0.01),
            gx.ef(),
            gx.allreduce(axis_name="data"),
            optimizer,
        ),
    }
    for name, tx in chains.items():
        params, sent = train(tx, mesh, (x, y), epochs)
        right = (logits(jax.device_get(params), x_held_out).argmax(-1) == y_held_out).mean()
        nbytes = on_the_link(sent, mesh.size)
        print(f"{name:12}{100 * right:6.2f} % right{nbytes:12,.0f} bytes a step and device")


if __name__ == "__main__":
    main()
