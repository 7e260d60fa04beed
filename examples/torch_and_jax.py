"""The loss in JAX, the parameters in torch: digits, compressed over torch.distributed.

JAX computes loss and gradient, compiled. The parameters are torch tensors; gradtx exchanges their
gradients between processes over gloo, and an optax optimizer steps, compiled too. Arrays pass from
one library to the other by DLPack.

pip install 'gradtx[jax,demo]'
python examples/torch_and_jax.py
torchrun --nproc-per-node 2 examples/torch_and_jax.py
"""

import argparse
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import gradtx as gx

BATCH = 64


def initial():
    generator = torch.Generator().manual_seed(0)
    sizes = [64, 256, 256, 10]
    params = {}
    for i, (n, m) in enumerate(itertools.pairwise(sizes)):
        params[f"{i}.weight"] = torch.randn(n, m, generator=generator) * (2 / n) ** 0.5
        params[f"{i}.bias"] = torch.zeros(m)
    return params


def logits(params, x):
    for i in range(3):
        x = x @ params[f"{i}.weight"] + params[f"{i}.bias"]
        x = jax.nn.relu(x) if i < 2 else x
    return x


@jax.jit
def loss_and_gradient(params, x, y):
    def loss(params):
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y)
        return entropy.mean()

    return jax.value_and_grad(loss)(params)


def train(data, rank, size, epochs):
    x, y = data
    params = initial()
    steps = epochs * (len(x) // BATCH)
    optimizer = gx.from_optax(optax.adamw(optax.cosine_decay_schedule(2e-3, steps)))
    tx = gx.chain(gx.filter_params(gx.is_matrix), gx.topk(0.02), gx.ef(), gx.allreduce(), optimizer)
    state = tx.init(params)
    shuffle = np.random.default_rng(0)
    for _ in range(epochs):
        order = shuffle.permutation(len(x))
        for start in range(0, len(x) - BATCH + 1, BATCH):
            mine = order[start : start + BATCH][rank::size]
            # The gradients are fresh arrays that nobody else holds, so their memory can be shared.
            # The parameters are copied: they change in place below, and JAX arrays never do.
            _, grads = loss_and_gradient(gx.to_jax(params), x[mine], y[mine])
            updates, state = tx.update(gx.to_torch(grads, copy=None), state, params)
            for name, param in params.items():
                param.add_(updates[name])
    return params


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    epochs = parser.parse_args().epochs
    torch.set_num_threads(1)
    rank, size = 0, 1
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    split = train_test_split(images, labels, test_size=0.3, random_state=0)
    x, x_held_out, y, y_held_out = split
    params = train((x, y), rank, size, epochs)

    found = logits(gx.to_jax(params), jnp.asarray(x_held_out)).argmax(-1)
    if rank == 0:
        print(f"{100 * (found == y_held_out).mean():.2f} % right")
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
