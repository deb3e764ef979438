"""What every method does in a moment, as a few numbers that are stored in golden.json.

A method's version number is part of the identity of its runs. Nobody remembers to raise it, so this
is checked: each case below trains a method on two short tasks, with a memory that overflows, in double
precision (so that neither the machine nor the order of a sum decides), and notes accuracies and
parameters. If they move by more than 1e-5, the behaviour has changed, and so must the version:

    python tests/golden.py        write golden.json anew, after raising a version
"""
import json
from pathlib import Path

import torch

FILE = Path(__file__).with_name('golden.json')
SHORT = dict(seeds=(100, 101), tasks=2, per_task=150, dtype=torch.float64)
TINY = dict(hidden=20, latent=3, samples=20, drawn=3, epochs=1, batch=25)
MEMORY = 40 # of 300 samples

CASES = { # method → settings of one or more runs
    'Online': [dict(passes=2), dict(batch=7)],
    'Independent': [dict()],
    'Joint': [dict(epochs=3), dict(epochs=2, average=0, weight_decay=0.)],
    'EWC': [dict(samples=30), dict(online=True, decay=.5, batch=4)],
    'ER': [dict(lr=.05, average=50, task_beta=.7), dict(single=True, rounds=.2, lr=.01),
           dict(replayed=7, current=5, weight_decay=1e-4)],
    'DER++': [dict(average=50, task_beta=.7), dict(replayed=7, current=5, alpha=.4, weight_decay=1e-4)],
    'MER': [dict(batches=2, replayed=5), dict(batches=2, replayed=5, algorithm=6, gamma=.3),
            dict(batches=1, replayed=5, engine='torch', gamma=.5)],
    'GEM': [dict(margin=.5), dict(batch=4)],
    'AGEM': [dict(reference=20)],
    'BiCL': [dict(), dict(K=3, inner='sgd', inner_lr=.1), dict(hypergradient='first-order'),
             dict(hypergradient='printed', adjoint_lr=.01, bisection='fixed', average=0, outer_loss='max',
                  outer_lr=.01, beta_lam=.8, beta_w=.9),
             dict(hypergradient='implicit', damping=30., weight_decay=1e-4),
             dict(store='ring', outer='adam', outer_lr=.001), dict(separate=True, outer_loss='softmax'),
             dict(store='k-center', rounds=.3, hidden=(20, 20), split='reversed'),
             dict(rounds=.3, hidden=(20, 20), split='vertical'), dict(inner='ridge', rounds=.3),
             dict(beta_lam=.5, beta_w=.7, rounds=.3), # averaged and pulled
             dict(task_first=True, beta_lam=.7, task_beta_lam=.5, average=0, rounds=.3)],
    'BiCL++': [dict(), dict(K=3, inner='sgd', inner_lr=.1, alpha_inner=.3, alpha_outer=.2),
               dict(hypergradient='implicit', damping=30., separate=True), dict(outer_loss='softmax', store='ring'),
               dict(rounds=.3, hidden=(20, 20), split='reversed', outer='adam', outer_lr=.001)],
    'VAE-naive': [TINY], 'VAE-EWC': [TINY], 'VAE-Joint': [TINY],
    'VAE-ER': [TINY | dict(replayed=9)], 'VAE-BiCL': [TINY | dict(replayed=9, K=2)],
    'VAE-BiCL-reversed': [TINY | dict(replayed=9, split='reversed')],
}

def moment(method, settings):
    "Train for a moment: accuracies, and each parameter seen from two directions."
    from bicl.core import Rng
    from bicl.learner import fit, make_learner
    from bicl.streams import make_stream
    draws = method.startswith('VAE')
    stream = make_stream('mnist-classes' if draws else 'mnist-permutations',
                         **SHORT | (dict(per_task=100) if draws else {}))
    if draws: stream.held = [h[:, :5] for h in stream.held]
    else: stream.test_x, stream.test_y = stream.test_x[:500], stream.test_y[:500]
    learner = make_learner(method, stream, memory=MEMORY, preset=False, **settings)
    run = fit(learner, stream, block=50, test='seen', progress=False)
    seen = {}
    for name, p in learner.state_dict().items():
        if not torch.is_tensor(p) or p.dtype != torch.float64 or p.dim() < 2 or len(p) != 2: continue
        if name.endswith('.raw') or 'memory' in name or name.startswith('M.'): continue # samples
        flat = p.detach().flatten(1)
        u = Rng([7], f'golden/{flat.shape[1]}').normal(flat.shape[1], dtype=torch.float64)[0]
        seen[name] = torch.stack([flat @ u, flat.abs().sum(1)]).flatten().tolist()
    return dict(accuracy=run.accuracy.nan_to_num(-1).flatten().tolist(), state=seen)

def key(method, settings): return f'{method} {json.dumps(settings, sort_keys=True)}'

def rounded(x): return float(f'{x:.9g}')

def moments(method):
    "All cases of a method, as they are stored."
    made = {key(method, s): moment(method, s) for s in CASES[method]}
    return {k: dict(accuracy=[rounded(a) for a in m['accuracy']],
                    state={n: [rounded(a) for a in v] for n, v in m['state'].items()})
            for k, m in made.items()}

def differences(method, stored):
    "What is no longer as it was stored, in words."
    out = []
    for case, new in moments(method).items():
        if case not in stored: out.append(f'{case} is not stored')
        else:
            old = stored[case]
            if far(old['accuracy'], new['accuracy']): out.append(f'{case}: accuracies differ')
            if old['state'].keys() != new['state'].keys(): out.append(f'{case}: other tensors')
            else: out += [f'{case}: {n} differs' for n in old['state']
                          if far(old['state'][n], new['state'][n])]
    return out

def far(a, b): return any(abs(x - y) > 1e-5 * max(1, abs(x)) for x, y in zip(a, b, strict=True))

if __name__ == '__main__':
    from bicl import baselines, bilevel, compiled, gem, generative, replay, rounds # noqa: F401
    from bicl.learner import METHODS
    out = dict(versions={m: METHODS[m].version for m in CASES},
               moments={m: moments(m) for m in CASES})
    FILE.write_text(json.dumps(out, indent=0) + '\n')
