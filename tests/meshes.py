"""Chains on a mesh of forced CPU devices, and what their compiled programs send."""

import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy
P = jax.sharding.PartitionSpec

import gradtx as gx  # noqa: E402
from gradtx.bench.hlo import collective_bytes  # noqa: E402


def over_axis(tx):
    """The chain, exchanging over the axis ``"data"``; what is no chain, as it is."""
    if not hasattr(tx, "transformations"):
        return tx

    def written(part):
        if part.name != "allreduce":
            return part
        settings = {name: part.hyperparameters[name] for name in ("op", "algorithm")}
        return gx.allreduce(axis_name="data", **settings)

    return gx.chain(*map(written, tx.transformations), check=False)


def mesh_of(size):
    return jax.make_mesh((size,), ("data",), devices=jax.devices()[:size])


def laid_out(mesh, stacked):
    """Gradients ``[size, ...]``, one row on each device."""
    return jax.device_put(stacked, jax.NamedSharding(mesh, P("data")))


class OnMesh:
    """A chain on a mesh, compiled.

    Args:
        tx: exchanges over the axis ``"data"``.
        params: a tree of arrays, the same on all devices.
        size: how many devices.
        check_vma: of `jax.shard_map`.
        donate: of `jax.jit`: 0 are the gradients, 1 is the state.
        scaled: whether the chain takes a loss scale.
    """

    def __init__(self, tx, params, size, *, check_vma=True, donate=(), scaled=True):
        self.mesh = mesh_of(size)
        self.specs = gx.partition_specs(jax.eval_shape(tx.init, params), axis_name="data")

        def step(stacked, state, scale):
            own = jax.tree.map(lambda x: x[0], stacked)
            return tx.update(own, state, **({"loss_scale": scale} if scaled else {}))

        specs = (P("data"), self.specs, P()), (P(), self.specs)
        mapped = {"mesh": self.mesh, "check_vma": check_vma}
        self.init = jax.jit(jax.shard_map(tx.init, in_specs=P(), out_specs=self.specs, **mapped))
        self.update = jax.jit(
            jax.shard_map(step, in_specs=specs[0], out_specs=specs[1], **mapped),
            donate_argnums=donate,
        )
        self.start = self.state = self.init(params)

    def again(self):
        """The same, before the first step: nothing is compiled anew."""
        self.state = self.start
        return self

    def step(self, stacked, scale=1.0):
        """One step on gradients ``[size, ...]``; the updates."""
        updates, self.state = self.update(
            laid_out(self.mesh, stacked), self.state, jnp.float32(scale)
        )
        return updates

    def sent(self, stacked):
        """By collective, the bytes that one device puts into it."""
        arguments = laid_out(self.mesh, stacked), self.state, jnp.float32(1.0)
        text = self.update.lower(*arguments).compile().as_text()
        return collective_bytes(text, self.mesh.size)
