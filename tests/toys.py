"""Methods and benchmarks for the tests of the runner: tiny, slow on purpose, or deadly."""
import os
import time
from dataclasses import dataclass

import torch

from bicl.core import Rng
from bicl.data import DataError
from bicl.learner import Learner, register_method
from bicl.models import MLP, losses
from bicl.streams import Stream, register_benchmark


def blobs(name, seeds, tasks=3, per_task=60, device='cpu', dtype=torch.float32):
    "Four clouds of points in twelve dimensions; every task draws its own samples."
    r = Rng([7], 'toy')
    centres, y = r.normal(4, 12)[0], r.integers(4, 400)[0]
    x = centres[y] + r.normal(400, 12)[0]
    draws = [Rng(seeds, f'{name}/draw/{t}').permutation(300, per_task) for t in range(tasks)]
    return Stream(name, seeds, (x[:300], y[:300]), draws, (x[300:], y[300:]), classes=4)


def nowhere(name, seeds, **kw): raise DataError('the toy set is not on this machine')


register_benchmark('toy', blobs)
register_benchmark('toy-nowhere', nowhere)


@dataclass
class Plain:
    "Settings of a method without a memory."
    lr: float = .1  # step size
    sleep: float = 0.  # seconds per block
    die: str = ''  # a folder: attempts leave a mark there and kill their own kernel
    deaths: int = 1  # how many attempts do
    fail: bool = False  # raise an error


@dataclass
class WithMemory(Plain):
    "The same with a memory, which it does not use."
    memory: int = 10


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
            os.kill(os.getpid(), 9)

    def predict(self, x, t): return self.model(x)


register_method('Toy', Toy, WithMemory)
register_method('Rival', Toy, WithMemory)
register_method('Plain', Toy, Plain)
