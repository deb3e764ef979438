"""What `test_bits.py` runs in fresh processes: every method for a moment, as digests of its bits.

    python tests/bits.py THREADS SEEDS [METHODS]     prints {method: {seed: digest}} as JSON
"""
import json, sys

import torch

from bicl import baselines, bilevel, compiled, gem, generative, replay, rounds # register their methods
from bicl.core import digest
from bicl.learner import METHODS, fit, make_learner
from bicl.streams import make_stream

TINY = dict(hidden=16, latent=3, samples=10, drawn=2, epochs=1, batch=25)
MORE = { # settings that keep it short, or that take another way through the code
    'MER': [dict(batches=2, replayed=5)], 'Joint': [dict(epochs=1)],
    'GEM': [dict(margin=.5), dict(margin=.5, memory=1300)], # pairs, and pixels
    'BiCL': [dict(), dict(K=3, inner='sgd', inner_lr=.1), dict(outer_loss='max'), # compiled, and not
             dict(split='reversed', rounds=.2), dict(inner='ridge', rounds=.5),
             dict(hypergradient='first-order', rounds=.2), dict(K=3, rounds=.2)],
    'BiCL++': [dict(), dict(alpha_inner=0., outer_loss='max'), dict(split='reversed', rounds=.2)],
    'ER': [dict(current=3, replayed=2), dict(single=True, average=0, rounds=.2),
           dict(hidden=(120,), rounds=.2)], # too wide to be compiled
    'DER++': [dict(current=3, replayed=2, average=20)]}

def moment(method, seeds, settings):
    "The bits of every replica after two short tasks: parameters, and what is predicted."
    draws = issubclass(METHODS[method].cls, generative.NaiveVAE)
    large = settings.get('memory', 0) > 1000
    stream = make_stream('mnist-classes' if draws else 'mnist-permutations', seeds, tasks=2,
                         per_task=700 if large else 60)
    learner = make_learner(method, stream, preset=False, **dict(memory=30) | settings | (TINY if draws else {}))
    stream.test_x, stream.test_y = stream.test_x[:300], stream.test_y[:300]
    if draws: stream.held = [h[:, :3] for h in stream.held]
    if draws: stream.test_x, stream.test_y = stream.x, stream.y
    run = fit(learner, stream, block=20 if not large else 690, test='new', progress=False)
    return {str(s): digest(*(p[r] for p in learner.parameters()), run.accuracy[r].nan_to_num(-1))
            for r, s in enumerate(seeds)}

def all_bits(seeds, methods):
    return {f'{m} {s}': moment(m, seeds, s) for m in methods for s in MORE.get(m, [{}])}

if __name__ == '__main__':
    threads, seeds, *methods = sys.argv[1:]
    torch.set_num_threads(int(threads))
    ours = [m for m in METHODS if METHODS[m].cls.__module__.startswith('bicl.')]
    print(json.dumps(all_bits([int(s) for s in seeds.split(',')], methods or ours)))
