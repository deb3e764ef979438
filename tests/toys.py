"""The one toy study of all tests: a tiny benchmark, three tiny methods, a grid, and results of runs that never were.

A grid that names this module under `plugins` may use everything in it. The methods train for real,
but take milliseconds; they can be told to be slow, to fail, or to kill their own kernel.
"""
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from bicl.adapters import stream_from_arrays
from bicl.core import Rng, Settings, within
from bicl.data import DataError
from bicl.learner import Learner, register_method
from bicl.models import MLP, losses
from bicl.streams import Stream, register_benchmark


def blobs(name, seeds, tasks=3, per_task=60, tuning=False, device='cpu', dtype=torch.float32):
    "Four clouds of points in twelve dimensions; every task draws its own samples."
    r = Rng([7], 'toy')
    centres, y = r.normal(4, 12)[0], r.integers(4, 400)[0]
    x = centres[y] + r.normal(400, 12)[0]
    cut, end = (250, 300) if tuning else (300, 400)
    draws = [Rng(seeds, f'{name}/draw/{t}').permutation(cut, per_task) for t in range(tasks)]
    return Stream(name, seeds, (x[:cut], y[:cut]), draws, (x[cut:end], y[cut:end]), classes=4, device=device, dtype=dtype)


def nowhere(name, seeds, **kw): raise DataError('the toy set is not on this machine')


def photographs(seeds=(100, 103), device='cpu'):
    "Two tasks of two classes, pictures of 3 × 8 × 8 bytes, for networks that convolve."
    x, y = Rng([7], 'photographs').integers(256, 120, 3, 8, 8)[0].to(torch.uint8), torch.arange(120) % 4
    return stream_from_arrays(x, y, y//2, seeds=seeds, name='photographs', keep_shape=True, device=device)


register_benchmark('toy', blobs, 'Toy clouds', order=50)
register_benchmark('toy-nowhere', nowhere, 'Toy clouds that are not here', order=51)


@dataclass
class Plain(Settings):
    "Settings of a method without a memory."
    lr: float = within(.1, above=0)  # step size
    sleep: float = within(0., low=0)  # seconds per block
    die: str = ''  # a folder: attempts leave a mark there and kill their own kernel
    deaths: int = within(1, low=0)  # how many attempts do
    fail: bool = False  # raise an error


@dataclass
class WithMemory(Plain):
    "The same with a memory, which it does not use."
    memory: int = within(10, low=1)


class Toy(Learner):
    def __init__(self, info, settings):
        super().__init__(info, settings)
        self.model = MLP(self.rng('init'), (info.d, 8, info.classes), dtype=info.dtype)

    def observe(self, block):
        s = self.settings
        if s.fail: raise RuntimeError('the toy fails on purpose')
        if s.die: self.maybe_die(s)
        time.sleep(s.sleep)
        p = list(self.model.parameters())
        loss = losses(self.model(block.x), block.y)
        g = torch.autograd.grad(loss.sum(), p)
        with torch.no_grad(): torch._foreach_add_(p, g, alpha=-s.lr)
        return loss.detach()

    @staticmethod
    def maybe_die(s):
        os.makedirs(s.die, exist_ok=True)
        if (k := len(os.listdir(s.die))) < s.deaths:
            open(f'{s.die}/{k}', 'w').close()
            os.write(2, b'fatal: the toy dies on purpose\n') # past Jupyter
            os.kill(os.getpid(), 9)

    def predict(self, x, t): return self.model(x)


register_method('Toy', Toy, WithMemory, label='Our toy', color='#0173b2', marker='o', order=50)
register_method('Rival', Toy, WithMemory, label='Its rival', color='#de8f05', marker='s', order=51)
register_method('Plain', Toy, Plain, label='Plain', color='#949494', marker='v', order=52)


# ---- a study without a single run: for tests of tables, figures and pages

GRID = '''
title: Toys
plugins: [toys]
seeds: [100, 101, 102]
benchmark: [mnist-rotations, toy]
protocol: strict
runs:
- {method: [Toy, Rival], memory: [10, 20]}
- {method: Plain}
'''


def fake(job, out, level=80., T=4):
    "Write rows and notebook of a run that never took place."
    from bicl.jobs import finish, result_path
    from bicl.learner import Run
    g = torch.Generator().manual_seed(sum(map(ord, job.label)))
    a = level + torch.rand(len(job.seeds), T + 1, T, generator=g, dtype=torch.float64)
    run = Run(job.benchmark, job.method, job.protocol, job.seeds, a, task=T, train_seconds=3., test_seconds=1.)
    rows = finish(job, run, str(out))
    empty = dict(cells=[], metadata={}, nbformat=4, nbformat_minor=5)
    result_path(job, out).with_suffix('.ipynb').write_text(json.dumps(empty))
    return rows


def study(folder):
    "A grid with all its rows on the disk: the grid's file, and its folder."
    from bicl.jobs import load_grid
    grid, out = Path(folder)/'toys_grid.yaml', Path(folder)/'out'
    grid.write_text(GRID)
    for job in load_grid(grid).jobs: fake(job, out, 85. if job.method == 'Toy' else 80.)
    return grid, out
