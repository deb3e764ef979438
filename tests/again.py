"""The same again? A quarter of Table 1, run anew from fresh clones with empty caches, and compared with what is committed.

    python tests/again.py          # `make again`: twice, about 20 minutes each on two cores

Every method at memory 200 or without one on two benchmarks whose data are in the repository, and BiCL at 5,120. What was
found is in reports/again.csv, and on the page `reproducibility`. The same bits as in the repository can only be expected
on a machine of the same kind: other processors add in another order. The rounds must have the same bits anywhere.
"""
import argparse, os, subprocess, sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

from bicl.core import atomic
from bicl.jobs import read_result
from bicl.metrics import accuracies

ROOT = Path(__file__).resolve().parent.parent
GRID = '''
title: A quarter of Table 1, again
seeds: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
benchmark: [mnist-permutations, fashion-permutations]
settings: {stream.test: seen} # as in table1
runs:
- {method: [MER, GEM], memory: 200, protocol: strict, seeds: [0, 1, 2, 3, 4]}
- {method: BiCL, memory: 5120, benchmark: mnist-permutations, protocol: buffered}
- {method: [BiCL, ER], memory: 200, protocol: buffered}
- {method: AGEM, memory: 200, protocol: strict}
- {method: [EWC, Independent, Online], protocol: strict}
- {method: Joint, protocol: buffered}
'''
RUN = 'import sys\nfrom bicl.commands import bicl_run\nsys.exit(bicl_run())\n'
KEY = ['seed', 'task_trained', 'task_tested', 'metric']


def run(grid:str, out):
    "All runs of a grid, by a fresh clone of what is committed, with nothing compiled before."
    with TemporaryDirectory(prefix='bicl-again-') as d:
        clone, file = Path(d)/'bicl', Path(d)/'again.yaml'
        subprocess.run(['git', 'clone', '--quiet', '--depth', '1', f'file://{ROOT}', clone], check=True)
        file.write_text(grid)
        env = os.environ | dict(PYTHONPATH=str(clone), NUMBA_CACHE_DIR=f'{d}/numba')
        subprocess.run([sys.executable, '-c', RUN, file, '--out', out], cwd=clone, env=env, check=True)


def compared(new, old)->dict: # two results of the same run
    "How many numbers there are, how many differ, by how much at most, and how far the mean RA is off."
    if not old.exists(): return dict(numbers=0, differing=0, most=float('nan'), shift=float('nan'))
    both = [read_result(p) for p in (new, old)]
    a, b = (r.set_index(KEY).value for r in both)
    apart, (now, then) = (a - b.reindex(a.index)).abs(), (accuracies(r).RA.mean() for r in both)
    return dict(numbers=len(a), differing=int((apart != 0).sum() + (len(a) != len(b))), most=apart.max(), shift=now - then)


def main(times:int, grid:str=GRID, committed=ROOT/'reports'/'table1', to=ROOT/'reports'/'again.csv'):
    found = []
    with TemporaryDirectory(prefix='bicl-again-') as d:
        for i in range(times):
            run(grid, out := Path(d)/str(i))
            for p in sorted(out.glob('runs/*.parquet')):
                about = read_result(p).iloc[0][['benchmark', 'method', 'memory', 'protocol', 'stamp']].to_dict()
                found.append(dict(time=i + 1) | about | compared(p, Path(committed)/'runs'/p.name)
                             | dict(unlike_first=compared(p, Path(d)/'0'/'runs'/p.name)['differing']))
            table = pd.DataFrame(found)
            with atomic(to) as f: f.write(table.to_csv(index=False)) # after every round
    print(table.groupby('time')[['numbers', 'differing', 'unlike_first']].sum().to_string())
    return int((table.differing > 0).any() or (table.numbers == 0).any())


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--times', type=int, default=2, help='clones, one after the other')
    sys.exit(main(parser.parse_args().times))
