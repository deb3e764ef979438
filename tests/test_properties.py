"""Whatever is thrown at settings, grids, arrays, checkpoints and result files: a result, or a `ValueError` of one line.

The line names what is wrong; and no file is left half written. The examples are the same in every run.
"""
import json
import re
from dataclasses import asdict, fields, replace

import numpy as np
import pytest
import toys
import yaml
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.extra import numpy as arrays

from bicl.checkpoint import load_checkpoint, save_checkpoint
from bicl.commands import seed_list
from bicl.core import atomic, digest, load_yaml
from bicl.jobs import Grid, Job, ResultError, finish, load_grid, read_result, result_path
from bicl.learner import METHODS, fit, make_settings
from bicl.streams import Stream
from bicl.tables import md, tex

SAME = dict(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
often = settings(max_examples=100, **SAME)

scalars = (st.none() | st.booleans() | st.integers() | st.integers(2**62, 2**70) | st.floats() | st.text(max_size=8)
           | st.sampled_from(['1e-3', '!!set', 'nan', '../x', 'BiCL', 'toy', 'strict', '<script>', '\n']))
values = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=3), max_leaves=6)


def answer(f, *args, error=ValueError, **kw):
    "What a function returns; None if it raises the error in one line."
    try: return f(*args, **kw)
    except error as e:
        assert str(e) and '\n' not in str(e), f'{e!r} is not one line'
        return None


# ---- settings

names = st.sampled_from(sorted({f.name for m in METHODS.values() for f in fields(m.settings)}))


@often
@given(st.sampled_from(sorted(METHODS)), st.dictionaries(names | st.text(max_size=5), values, max_size=3))
def test_settings(name, given):
    "Accepted settings are as they were given, and can be part of an identity; an error names one of them."
    m = METHODS[name]
    try: got = make_settings(m, given)
    except ValueError as e:
        assert '\n' not in str(e) and name in str(e) and any(k in str(e) or repr(k) in str(e) for k in given), e
        return
    assert all(getattr(got, k) == (tuple(v) if isinstance(v, list) else v) for k, v in given.items())
    assert len(digest(asdict(got))) == 16


jobs = st.fixed_dictionaries({}, optional=dict(
    benchmark=scalars, method=scalars, memory=values, seeds=st.lists(scalars, max_size=3).map(tuple), protocol=scalars,
    settings=st.dictionaries(st.sampled_from(['stream.tasks', 'stream.block', 'stream.test', 'lr', 'stream.']), scalars, max_size=2),
    preset=scalars, device=scalars, notebook=scalars, tuning=scalars))


@often
@given(jobs)
def test_jobs(given):
    "A job that passes its check has an identity that JSON can keep."
    job = replace(Job('toy', 'Toy', 10, (1, 2)), **given)
    try: job.check()
    except ValueError as e: assert str(e) and '\n' not in str(e)
    else: json.dumps(job.question(), allow_nan=False)


@often
@given(st.text(max_size=20))
def test_seeds_as_text(text):
    got = answer(seed_list, text)
    assert got is None or all(isinstance(s, int) for s in got)


# ---- grids

entries = st.dictionaries(st.sampled_from(['benchmark', 'method', 'memory', 'seeds', 'settings', 'sweep', 'device', 'preset', 'x']), values, max_size=4)
forms = st.fixed_dictionaries(dict(runs=st.lists(entries | values, max_size=2) | values),
                              optional=dict(benchmark=values, seeds=values, title=values, report=values, plugins=st.lists(st.just('toys')) | values))


def is_grid(path):
    try: got = load_grid(path)
    except ValueError as e: # one line for each entry that is wrong
        assert path.name in str(e) and all(s.startswith('  entry ') for s in str(e).split('\n')[1:]), e
    else: assert isinstance(got, Grid) and got.jobs


@often
@given(forms | values)
def test_grids(tmp_path_factory, form):
    path = tmp_path_factory.getbasetemp()/'grid.yaml'
    path.write_text(yaml.safe_dump(form, allow_unicode=True), encoding='utf-8')
    is_grid(path)


@often
@given(st.text('abrunsmethod: [{}]-,!&*\n"\'', max_size=60) | st.binary(max_size=30))
def test_grids_that_are_no_yaml(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp()/'text.yaml'
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    answer(load_yaml, path)
    is_grid(path)


# ---- arrays

dtypes = st.sampled_from([np.float32, np.float64, np.uint8, np.int64, np.bool_, np.complex64, np.dtype('U3'), object])
some = dtypes.flatmap(lambda d: arrays.arrays(d, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
                                              elements=st.integers(0, 3) if d is object else None))
few = st.integers(2, 12).flatmap(lambda n: st.tuples(
    arrays.arrays(np.float32, (n, 3), elements=st.floats(-5, 5, width=32) | st.just(np.nan)),
    arrays.arrays(np.int64, n, elements=st.integers(-1, 3) | st.just(10**9)), arrays.arrays(np.int64, n, elements=st.integers(0, 2))))


@often
@given(few | st.tuples(some, some, some), scalars | st.just((0, 1)), st.sampled_from([None, 0, 4, 'x', 10**9]))
def test_arrays(xyt, seeds, classes):
    "A stream of what can be one, which can be walked through from end to end; else an error."
    stream = answer(toys.stream_from_arrays, *xyt, seeds=seeds, classes=classes)
    if stream is None: return
    assert isinstance(stream, Stream)
    for t in range(stream.T):
        for b in stream.blocks(t): assert b.x.isfinite().all() and 0 <= b.y.min() and b.y.max() < stream.classes


# ---- files

@pytest.fixture(scope='module')
def kept(tmp_path_factory):
    "A checkpoint and a result, as bytes."
    d, job = tmp_path_factory.mktemp('kept'), Job('toy', 'Toy', 10, (100, 101), device='cpu')
    learner, stream = job.make()
    run = fit(learner, stream, progress=False)
    finish(job, run, str(d))
    save_checkpoint(d/'c.safetensors', learner, run, dict(a=1))
    return d, {p.suffix: p.read_bytes() for p in (d/'c.safetensors', result_path(job, d))}


damage = st.lists(st.tuples(st.integers(0, 10**6), st.binary(max_size=6), st.sampled_from(['cut', 'put', 'insert'])), min_size=1, max_size=3)


def damaged(b, what):
    for at, new, how in what:
        at %= len(b) + 1
        b = b[:at] if how == 'cut' else b[:at] + new + b[at + (len(new) if how == 'put' else 0):]
    return b


@often
@given(damage | st.binary(max_size=100))
def test_checkpoints(kept, what):
    "Read as it was written, or refused by its name."
    d, bytes_ = kept
    path, whole = d/'damaged.safetensors', bytes_['.safetensors']
    path.write_bytes(what if isinstance(what, bytes) else damaged(whole, what))
    got = answer(load_checkpoint, path)
    if got is not None:
        (d/'whole.safetensors').write_bytes(whole)
        tensors, head = load_checkpoint(d/'whole.safetensors')
        assert got[1] == head and all(got[0][k].equal(v) for k, v in tensors.items())


@often
@given(damage | st.binary(max_size=100))
def test_result_files(kept, what):
    "Read as they were written, or refused by their name."
    d, bytes_ = kept
    path, whole = d/'damaged.parquet', bytes_['.parquet']
    path.write_bytes(what if isinstance(what, bytes) else damaged(whole, what))
    got = answer(read_result, path, error=ResultError)
    if got is not None:
        (d/'whole.parquet').write_bytes(whole)
        assert got.equals(read_result(d/'whole.parquet'))


@often
@given(st.lists(st.text(max_size=9).map(lambda s: s.replace('\r', '')), max_size=5), st.none() | st.integers(0, 4))
def test_files_are_whole(tmp_path_factory, parts, fails):
    "Old or new, never between, and nothing beside them."
    folder = tmp_path_factory.mktemp('atomic', numbered=True)
    (folder/'a').write_text('old')
    try:
        with atomic(folder/'a') as f:
            for i, p in enumerate(parts):
                if i == fails: raise RuntimeError
                f.write(p)
    except RuntimeError: assert (folder/'a').read_text() == 'old'
    else: assert (folder/'a').read_text(encoding='utf-8') == ''.join(parts)
    assert [p.name for p in folder.iterdir()] == ['a']


# ---- names in tables

@often
@given(st.text(max_size=20) | st.text('|<>&$\\_{}[]()`*#%~^\n ab', max_size=20))
def test_names_mean_nothing(text):
    "In Markdown no bar, tag or link of theirs is one; in LaTeX all is ASCII, and braces and dollars come in pairs."
    a, b = md(text), tex(text)
    assert '\n' not in a and '<' not in a and not re.search(r'(?<!\\)(\\\\)*[|`\[\]]', a)
    assert b.isascii() and '\n' not in b
    plain = re.sub(r'\\(textbackslash\{\}|[\^~]\{\}|[{}$%&#_])', '', b)
    assert plain.count('{') == plain.count('}') and plain.count('$') % 2 == 0 and not re.search('[%&#_^~]', re.sub(r'\$[^$]*\$', '', plain))
