"""A method's version number is part of the identity of its runs: here it is held to its word."""
import json

import pytest
from golden import CASES, FILE, differences

from bicl import baselines, bilevel, compiled, gem, generative, replay, rounds # register their methods
from bicl.learner import METHODS
from bicl.models import only
from bicl.reptile import Level
from bicl.solvers import Adam

STORED = json.loads(FILE.read_text())
OURS = [m.name for m in METHODS.values() if m.cls.__module__.startswith('bicl.')]

def test_every_method_has_a_golden_run():
    assert set(OURS) == set(CASES) == set(STORED['versions'])

@pytest.mark.parametrize('method', CASES)
def test_behaviour_belongs_to_its_version(method):
    now, then = METHODS[method].version, STORED['versions'][method]
    assert now == then, f'{method} has version {now}, stored is {then}: run python tests/golden.py'
    new = differences(method, STORED['moments'][method])
    assert not new, f'the behaviour of {method} changed: raise its version. {"; ".join(new)}'

@pytest.mark.parametrize('what, change', [
    ((Adam, 'step'), lambda old: lambda self, w, g, s: old(self, w, 1.001 * g, s)), # an update rule
    ((Level, 'pull'), lambda old: lambda self, lam, w: None), # Reptile left out
])
def test_a_changed_rule_is_noticed(monkeypatch, what, change):
    owner, name = what
    monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    monkeypatch.setitem(CASES, 'BiCL', CASES['BiCL'][:1])
    with only('torch'): assert differences('BiCL', STORED['moments']['BiCL']) # what was changed
