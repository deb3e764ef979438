"""Methods on pictures with three dimensions, through the convolutional network: they run, and keep their promises."""
from unittest.mock import patch

import pytest
import torch
from bits import MORE
from toys import photographs

from bicl import baselines, bilevel, gem, generative, hypergrad, replay  # noqa: F401  (they register)
from bicl.checkpoint import check_learner
from bicl.learner import METHODS, fit, make_learner
from bicl.models import ConvNet

OURS = [m for m in METHODS if METHODS[m].cls.__module__.startswith('bicl.')
        and not issubclass(METHODS[m].cls, generative.NaiveVAE)]
CASES = [(m, s) for m in OURS for s in ([{}] if m == 'BiCL' else MORE.get(m, [{}]))[:1]] + [
    ('BiCL', dict(K=3, inner='sgd', inner_lr=.1)), ('BiCL', dict(split='reversed')), ('BiCL', dict(store='k-center'))]

def made(method, stream, **settings):
    return make_learner(method, stream, **dict(memory=16, hidden=(4, 6)) | settings)

@pytest.mark.filterwarnings('ignore:Independent is told')
@pytest.mark.parametrize('method, settings', CASES, ids=str)
def test_alone_and_in_company(method, settings):
    "Every method learns pictures; a replica alone and with two threads ends with the bits that it has among others."
    ends, threads = [], torch.get_num_threads()
    for seeds, n in ((100, 103), 1), ((103,), 2):
        torch.set_num_threads(n)
        learner = made(method, stream := photographs(seeds), **settings)
        run = fit(learner, stream, block=20, test='new', progress=False)
        ends.append([*learner.parameters(), run.accuracy.nan_to_num(-1)])
    torch.set_num_threads(threads)
    assert any(isinstance(m, ConvNet) for m in learner.modules())
    assert all(a[1].equal(b[0]) for a, b in zip(*ends))

@pytest.mark.parametrize('method', ['ER', 'BiCL', 'Joint'])
def test_stopped_and_resumed(method):
    check_learner(lambda: made(method, stream), stream := photographs(), block=20)

def test_bicl_works_in_feature_space():
    "The round of the convolutional network is the cheap one."
    learner = made('BiCL', stream := photographs())
    with patch.object(hypergrad, 'Trunk', wraps=hypergrad.Trunk) as trunk:
        learner.observe(next(iter(stream.blocks(0, size=20))))
    assert trunk.call_count == 20 # rounds

def test_what_cannot_be():
    with pytest.raises(ValueError, match='split="vertical" is for rows'): made('BiCL', photographs(), split='vertical')
