"""Write into presets.yaml what a search has found: of each method, benchmark and memory the setting with the largest RA.

    python nbs/experiments/choose_presets.py search_outputs 'BiCL++' 'DER++'

The search must be on streams in tuning mode. Rotations over 0–180° are not searched and take those of 0–90°.
"""
import json, re, sys
from dataclasses import asdict
from pathlib import Path

from bicl.core import atomic, load_yaml
from bicl.jobs import load_grid
from bicl.learner import find_method, make_settings
from bicl.tables import collect

HERE = Path(__file__).resolve().parent
SAME = {'mnist-rotations-180': 'mnist-rotations'} # benchmark → the one whose settings it takes

def found(grid:str, method:str, rows=None)->dict: # benchmark → memory → settings that differ from the defaults
    "The winners of a search."
    study = collect(load_grid(grid), rows or HERE.parents[1]/'reports'/grid)
    rows, out = study.rows[study.rows.method == method], {}
    if not rows.tuning.all(): raise ValueError(f'{grid} has tested {method} on reported images')
    used = rows.drop_duplicates('stamp').set_index('stamp').settings.map(json.loads)
    RA = study.values[(study.values.metric == 'RA') & (study.values.method == method)]
    best = RA.groupby(['benchmark', 'memory', 'stamp'], sort=False).value.mean()
    default = asdict(make_settings(find_method(method), {}))
    for (b, m), part in best.groupby(['benchmark', 'memory'], sort=False):
        won = used[part.idxmax()[-1]]
        out.setdefault(b, {})[int(m)] = {
            k: won[k] for k, v in default.items() if k != 'memory' and won[k] != json.loads(json.dumps(v))}
    for b, other in SAME.items():
        if other in out: out[b] = out[other]
    return out

def block(method:str, entries:dict)->str:
    "The entry of a method, as YAML."
    flow = lambda d: '{' + ', '.join(f'{k}: {json.dumps(v)}' for k, v in d.items()) + '}'
    text = f'{method}: # by choose_presets.py\n'
    for b, found in entries.items():
        if not all(isinstance(m, int) for m in found): text += f'  {b}: {flow(found)}\n'
        else: text += f'  {b}:\n' + ''.join(f'    {m}: {flow(d)}\n' for m, d in sorted(found.items()))
    return text

def main(grid:str, *methods:str):
    path = HERE/'presets.yaml'
    text = path.read_text(encoding='utf-8')
    for m in methods:
        other = (load_yaml(path) or {}).get(m) or {} # benchmarks that were not searched stay
        entry = re.compile(rf'^{re.escape(m)}:.*?(?=^\S|\Z)', re.M | re.S)
        if not entry.search(text): text += f'{m}:\n'
        text = entry.sub(lambda _, m=m, other=other: block(m, other | found(grid, m)), text)
    with atomic(path) as f: f.write(text)

if __name__ == '__main__': main(*sys.argv[1:])
