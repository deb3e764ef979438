"Bad data: every fault gets an error that says what to do, and leaves nothing half-written."
import gzip, hashlib, http.server, io, lzma, os, shutil
import subprocess, sysconfig, tarfile, tempfile, threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import datasets

from bicl import data
from bicl.core import project_root

ROOT = project_root()
ARCHIVE = data.DATA['notmnist'].archive.name


def describe(monkeypatch, name, **changes):
    "Change the description of a set for the time of a test."
    monkeypatch.setitem(data.DATA, name, replace(data.DATA[name], **changes))


@pytest.fixture
def world(monkeypatch):
    "An empty machine: own project, data and cache folders, and no network. Readable by everybody."
    tmp = Path(tempfile.mkdtemp(prefix='bicl-test-'))
    for d in ('', 'project', 'own', 'cache'):
        (tmp/d).mkdir(exist_ok=True)
        (tmp/d).chmod(0o755)
    monkeypatch.setattr(data, 'project_root', lambda: tmp/'project')
    monkeypatch.setenv('BICL_DATA', str(tmp/'own'))
    monkeypatch.setenv('BICL_CACHE', str(tmp/'cache'))
    for name in ('notmnist', 'cifar10'): describe(monkeypatch, name, sources=('http://127.0.0.1:9/',))
    for c in (datasets.MNIST, datasets.FashionMNIST):
        monkeypatch.setattr(c, 'mirrors', ['http://127.0.0.1:9/'])
    data._load.cache_clear()
    yield tmp
    data._load.cache_clear()
    for d in (tmp, *tmp.rglob('*')):
        if d.is_dir(): d.chmod(0o755)
    shutil.rmtree(tmp)


@pytest.fixture
def mortal():
    "Not root for a while, since folders are never read-only for root."
    if os.name != 'posix': pytest.skip('needs POSIX permissions')
    was = os.geteuid()
    if not was: os.seteuid(65534)
    yield
    if not was: os.seteuid(0)


@pytest.fixture
def serve():
    "Serve files (name → bytes) over HTTP on this machine; returns the address and the requests."
    servers = []
    def start(files):
        asked = []
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_HEAD(self): self.do_GET()
            def do_GET(self):
                body = files.get(self.path.split('/')[-1])
                if self.command == 'GET': asked.append(self.path)
                self.send_response(200 if body is not None else 404)
                self.send_header('Content-Length', str(len(body or b'')))
                self.end_headers()
                if self.command == 'GET':
                    with suppress(ConnectionError): self.wfile.write(body or b'')
            def log_message(self, *args): pass
        servers.append(s := http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler))
        threading.Thread(target=s.serve_forever, daemon=True).start()
        return f'http://127.0.0.1:{s.server_address[1]}/', asked
    yield start
    for s in servers:
        s.shutdown()
        s.server_close()


def mnist_into(folder, *, without=()):
    "Copy the project's MNIST files into a data folder."
    (raw := folder/'MNIST'/'raw').mkdir(parents=True)
    for f in (ROOT/'data'/'MNIST'/'raw').glob('*.gz'):
        if f.name not in without: shutil.copy(f, raw)
    return raw


def files_below(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob('*') if p.is_file())


def png(grey, size=(28, 28)):
    Image.fromarray(np.full(size, grey, np.uint8)).save(o := io.BytesIO(), 'png')
    return o.getvalue()


def tar_bytes(files, links=()):
    with tarfile.open(fileobj=(o := io.BytesIO()), mode='w:gz', compresslevel=1) as tar:
        for name, b in files.items():
            m = tarfile.TarInfo(name)
            m.size = len(b)
            tar.addfile(m, io.BytesIO(b))
        for name, target in links:
            m = tarfile.TarInfo(name)
            m.type, m.linkname = tarfile.SYMTYPE, target
            tar.addfile(m)
    return o.getvalue()


GOOD = {'notMNIST_small/B/x.png': png(30), 'notMNIST_small/A/b.png': png(20),
        'notMNIST_small/A/B.png': png(10), 'notMNIST_small/F/empty.png': b''}


def as_original(world, monkeypatch, b):
    "Let these bytes pass for the original archive."
    (f := world/'tmp.tar.gz').write_bytes(b)
    sums = [hashlib.sha256(data._idx(a)).hexdigest() for a in data.decode_archive(f)]
    f.unlink()
    d = data.DATA['notmnist']
    archive = replace(d.archive, size=len(b), sha256=hashlib.sha256(b).hexdigest())
    describe(monkeypatch, 'notmnist', archive=archive, files=dict(zip(d.files, sums)))


# MNIST ------------------------------------------------------------------------------------------

def test_equal_to_torchvision(world):
    raw = mnist_into(world/'own')
    (copy := world/'tv').mkdir()
    shutil.copytree(world/'own'/'MNIST', copy/'MNIST')
    for train, x, y in ((True, 'train_x', 'train_y'), (False, 'test_x', 'test_y')):
        theirs, ours = datasets.MNIST(copy, train=train, download=True), data.load('mnist')
        assert torch.equal(getattr(ours, x), theirs.data.flatten(1))
        assert torch.equal(getattr(ours, y), theirs.targets)
    assert files_below(raw) == sorted(dict(datasets.MNIST.resources)) # nothing unpacked beside them


def test_missing_file_is_named(world):
    mnist_into(world/'own', without=['t10k-labels-idx1-ubyte.gz'])
    assert not data.available('mnist')
    with pytest.raises(data.DataError) as e: data.load('mnist', download=False)
    assert f'{world/"own"/"MNIST"/"raw"} lacks t10k-labels-idx1-ubyte.gz;' in str(e.value)
    assert 'bicl_data --download' in str(e.value)


def test_no_network(world):
    for name in ('mnist', 'fashion', 'notmnist', 'cifar10'):
        with pytest.raises(data.DataError, match='failed: .*by other means'): data.load(name)
    assert files_below(world) == []


@pytest.mark.parametrize('fault', ['truncated', 'changed', 'empty'])
def test_damaged_mnist(world, fault):
    raw = mnist_into(world/'own')
    f = raw/'t10k-images-idx3-ubyte.gz'
    b = f.read_bytes()
    left = {'truncated': b[:100_000], 'changed': b[:-20] + b'x' + b[-19:], 'empty': b''}[fault]
    f.write_bytes(left)
    with pytest.raises(data.DataError) as e: data.load('mnist')
    sha = data.DATA['mnist'].files[f.name]
    for part in (str(f), f'{sha} was expected', f'{len(left):,} bytes', 'Restore it'):
        assert part in str(e.value)
    assert f.read_bytes() == left # the user's file is untouched
    assert files_below(world/'cache') == []


def test_mnist_is_downloaded_once(world, serve, monkeypatch):
    raw = ROOT/'data'/'MNIST'/'raw'
    url, asked = serve({f.name: f.read_bytes() for f in raw.glob('*.gz')})
    monkeypatch.setattr(datasets.MNIST, 'mirrors', [url])
    assert len(data.load('mnist').train_y) == 60_000
    assert data.find('mnist') == world/'cache'/'data'/'MNIST'/'raw'
    assert files_below(data.find('mnist')) == sorted(dict(datasets.MNIST.resources))
    assert {p.strip('/') for p in asked} == set(dict(datasets.MNIST.resources))
    asked.clear()
    data._load.cache_clear()
    data.load('mnist')
    assert not asked # the second time from the cache


def test_downloads_are_checked_by_sha256(world, serve, monkeypatch):
    "A file that unpacks and has the right form, but other pixels, is not taken from anybody."
    raw = ROOT/'data'/'MNIST'/'raw'
    files = {f.name: f.read_bytes() for f in raw.glob('*.gz')}
    content = bytearray(gzip.decompress(files['t10k-images-idx3-ubyte.gz']))
    content[5000] ^= 1
    files['t10k-images-idx3-ubyte.gz'] = gzip.compress(bytes(content), 1)
    monkeypatch.setattr(datasets.MNIST, 'mirrors', [serve(files)[0]])
    with pytest.raises(data.DataError, match='sha256 of its content is .* was expected'):
        data.load('mnist')
    assert files_below(world) == []


def test_interrupted_download_leaves_nothing(world, serve, monkeypatch):
    raw = ROOT/'data'/'MNIST'/'raw'
    files = {f.name: f.read_bytes() for f in raw.glob('*.gz')}
    files['t10k-labels-idx1-ubyte.gz'] = files['t10k-labels-idx1-ubyte.gz'][:1000]
    monkeypatch.setattr(datasets.MNIST, 'mirrors', [serve(files)[0]])
    with pytest.raises(data.DataError, match='download failed'): data.load('mnist')
    assert files_below(world) == []


@pytest.mark.parametrize('name, pack', [
    ('{}', lambda b: b), ('{}.xz', lambda b: lzma.compress(b, preset=0))], ids=['unpacked', 'xz'])
def test_other_packings(world, name, pack):
    raw = mnist_into(world/'own')
    f = raw/'t10k-images-idx3-ubyte.gz'
    (other := raw/name.format(f.stem)).write_bytes(pack(gzip.decompress(f.read_bytes())))
    f.unlink()
    assert len(data.load('mnist').test_y) == 10_000
    other.write_bytes(pack(b'something else'))
    data._load.cache_clear()
    with pytest.raises(data.DataError, match=f'{other.name}.*is damaged: sha256'): data.load('mnist')


def test_wrong_folder(world, monkeypatch):
    monkeypatch.setenv('BICL_DATA', str(world/'nowhere'))
    with pytest.raises(data.DataError, match='nowhere.*not a folder.*unset'): data.load('mnist')


@pytest.mark.parametrize('what, says', [('MNIST/raw/train-labels-idx1-ubyte.gz', 'cannot be read'),
                                        ('', 'not a folder that can be read')])
def test_unreadable(world, what, says, request):
    mnist_into(world/'own')
    (world/'own'/what).chmod(0)
    request.getfixturevalue('mortal')
    with pytest.raises(data.DataError, match=says) as e: data.load('mnist')
    assert what in str(e.value)


# Read-only folders ------------------------------------------------------------------------------

@pytest.fixture
def mortal_mnist(world, request):
    raw = mnist_into(world/'own')
    for d in (raw, raw.parent, world/'own'): d.chmod(0o555)
    for f in raw.iterdir(): f.chmod(0o444)
    request.getfixturevalue('mortal')
    with pytest.raises(PermissionError): (raw/'x').touch()


def test_read_only_data_is_enough(world, mortal_mnist):
    assert len(data.load('mnist').test_y) == 10_000


@pytest.mark.parametrize('name', ['mnist', 'notmnist'])
def test_read_only_cache(world, name, request):
    (world/'cache').chmod(0o555)
    request.getfixturevalue('mortal')
    with pytest.raises(data.DataError) as e: data.load(name)
    assert str(world/'cache') in str(e.value) and '$BICL_CACHE' in str(e.value)
    assert files_below(world) == []


def test_archive_with_read_only_cache(world, monkeypatch, request):
    b = tar_bytes(GOOD)
    as_original(world, monkeypatch, b)
    (world/'own'/ARCHIVE).write_bytes(b)
    (world/'cache').chmod(0o555)
    request.getfixturevalue('mortal')
    d = data.load('notmnist')
    assert len(d.train_y) + len(d.test_y) == 3
    assert files_below(world/'cache') == []


# notMNIST ---------------------------------------------------------------------------------------

def test_archive_order_and_empty_files(tmp_path):
    (f := tmp_path/ARCHIVE).write_bytes(tar_bytes(GOOD))
    x, y = data.decode_archive(f)
    assert x.shape == (3, 28, 28) and x.dtype == np.uint8
    assert x[:, 5, 5].tolist() == [10, 20, 30] and y.tolist() == [0, 0, 1] # A/B, A/b, B/x
    assert files_below(tmp_path) == [ARCHIVE] # nothing was extracted


@pytest.mark.parametrize('files, links, says', [
    ({'../../evil/A/x.png': png(1)}, (), 'leads out of it'),
    ({'/etc/A/x.png': png(1)}, (), 'leads out of it'),
    ({'notMNIST_small/A/../../../x.png': png(1)}, (), 'leads out of it'),
    ({}, [('notMNIST_small/A/x.png', '/etc/passwd')], 'leads out of it'),
    ({'notMNIST_small/C/x.png': png(1)[:45]}, (), 'C/x.png cannot be decoded'),
    ({'notMNIST_small/C/x.png': b'no picture'}, (), 'C/x.png cannot be decoded'),
    ({'notMNIST_small/C/x.png': png(1, (14, 14))}, (), r'C/x.png has \(14, 14\) pixels'),
])
def test_bad_archive(tmp_path, files, links, says):
    (f := tmp_path/ARCHIVE).write_bytes(tar_bytes(GOOD | files, links))
    with pytest.raises(data.DataError, match=says) as e: data.decode_archive(f)
    assert str(f) in str(e.value)
    assert files_below(tmp_path) == [ARCHIVE]


@pytest.mark.parametrize('b', [tar_bytes(GOOD)[:-200], b'', b'not an archive', tar_bytes({})],
                         ids=['truncated', 'empty', 'text', 'no files'])
def test_broken_archive(tmp_path, b):
    (f := tmp_path/ARCHIVE).write_bytes(b)
    with pytest.raises(data.DataError, match='not a whole tar.gz|holds no pictures'):
        data.decode_archive(f)


@pytest.mark.parametrize('cut, says', [(1, 'bytes, expected'), (0, 'has sha256')])
def test_wrong_archive_is_not_opened(world, monkeypatch, cut, says):
    b = tar_bytes(GOOD)
    as_original(world, monkeypatch, b)
    (f := world/'own'/ARCHIVE).write_bytes(b[:-9 - cut] + b'x' + b[-8:])
    monkeypatch.setattr(data, 'decode_archive', lambda p: pytest.fail('opened'))
    with pytest.raises(data.DataError, match=says) as e: data.load('notmnist')
    assert str(f) in str(e.value) and 'Delete it' in str(e.value)
    assert files_below(world/'cache') == []


def test_archive_is_downloaded_decoded_and_cached(world, serve, monkeypatch):
    b = tar_bytes(GOOD)
    as_original(world, monkeypatch, b)
    wrong, first = serve({ARCHIVE: b[:-3]})
    right, second = serve({ARCHIVE: b})
    describe(monkeypatch, 'notmnist', sources=('http://127.0.0.1:9/', wrong, right))
    d = data.load('notmnist')
    assert sorted([*d.train_y.tolist(), *d.test_y.tolist()]) == [0, 0, 1]
    assert (len(first), len(second)) == (1, 1)
    assert data.find('notmnist') == (raw := world/'cache'/'data'/'notMNIST'/'raw')
    assert files_below(raw) == sorted(data.DATA['notmnist'].files)
    data._load.cache_clear()
    again = data.load('notmnist')
    assert torch.equal(again.train_x, d.train_x) and (len(first), len(second)) == (1, 1)


def test_refused_download_leaves_nothing(world, serve, monkeypatch):
    url, _ = serve({ARCHIVE: b'an error page'})
    describe(monkeypatch, 'notmnist', sources=(url,))
    with pytest.raises(data.DataError, match='13 bytes, expected 8,458,043'): data.load('notmnist')
    assert files_below(world) == []


@pytest.mark.parametrize('fault, says', [('truncated', 'not a whole .gz file.*a9bc52'),
                                         ('changed', 'a9bc52.* was expected')])
def test_damaged_notmnist(world, fault, says):
    (raw := world/'own'/'notMNIST'/'raw').mkdir(parents=True)
    f = raw/'small-labels-idx1-ubyte.gz'
    whole = gzip.compress(data._idx(np.arange(100)))
    f.write_bytes(whole[:-12] if fault == 'truncated' else whole)
    images = raw/'small-images-idx3-ubyte.gz'
    images.write_bytes(whole)
    with pytest.raises(data.DataError, match=says) as e:
        data._read(f, data.DATA['notmnist'].files[f.name])
    assert str(f) in str(e.value)
    with pytest.raises(data.DataError, match='sha256.*59fe38.* was expected') as e: data.load('notmnist')
    assert str(images) in str(e.value)


@pytest.mark.skipif(not data.available('notmnist'), reason='notMNIST is not on this machine')
def test_real_pictures_survive_the_archive(world, monkeypatch):
    "All 18,724 pictures as PNGs in a tar.gz, in random order, give the documented arrays."
    monkeypatch.setattr(data, 'project_root', lambda: ROOT)
    monkeypatch.delenv('BICL_DATA')
    where = data.find('notmnist')
    real = data.load('notmnist')
    d = data.DATA['notmnist']
    x, y = (data._unidx(data._read(where/f, sha)) for f, sha in d.files.items())
    files = {}
    for i in np.random.default_rng(0).permutation(len(y)):
        Image.fromarray(x[i]).save(o := io.BytesIO(), 'png', compress_level=1)
        files[f'notMNIST_small/{"ABCDEFGHIJ"[y[i]]}/{i:05}.png'] = o.getvalue()
    b = tar_bytes(files | {'notMNIST_small/A/empty.png': b''})
    archive = replace(d.archive, size=len(b), sha256=hashlib.sha256(b).hexdigest())
    describe(monkeypatch, 'notmnist', archive=archive)
    monkeypatch.setattr(data, 'project_root', lambda: world/'project')
    (world/'project'/'data').mkdir()
    (world/'project'/'data'/ARCHIVE).write_bytes(b)
    ours = data.load('notmnist') # checks the sha256 of both arrays
    for k in ('train_x', 'train_y', 'test_x', 'test_y'):
        assert torch.equal(getattr(ours, k), getattr(real, k))


# CIFAR-10 ---------------------------------------------------------------------------------------

def toy_cifar(monkeypatch, **changes):
    "A small archive that passes for the original: seven records in six files, and a file of words."
    d = data.DATA['cifar10']
    record = lambda label, v: bytes([label]) + bytes([v])*3072
    contents = [record(i, 10*i) for i in range(6)]
    contents[4] += record(9, 7)
    inside = {f'cifar-10-batches-bin/{f}': b for f, b in zip(d.files, contents)}
    b = tar_bytes({'cifar-10-batches-bin/readme.html': b'words'} | inside | changes)
    archive = replace(d.archive, size=len(b), sha256=hashlib.sha256(b).hexdigest())
    files = {f: hashlib.sha256(c).hexdigest() for f, c in zip(d.files, contents)}
    describe(monkeypatch, 'cifar10', archive=archive, files=files)
    return b


def test_cifar_is_downloaded_decoded_and_cached(world, serve, monkeypatch):
    b = toy_cifar(monkeypatch)
    url, asked = serve({data.DATA['cifar10'].archive.name: b})
    describe(monkeypatch, 'cifar10', sources=(url,))
    d = data.load('cifar10')
    assert d.train_y.tolist() == [0, 1, 2, 3, 4, 9] and d.test_y.tolist() == [5]
    assert d.train_x.shape == (6, 3072) and d.train_x.dtype == torch.uint8 and d.shape == (3, 32, 32)
    assert d.train_x[:, 0].tolist() == [0, 10, 20, 30, 40, 7] and d.train_x.is_contiguous()
    assert data.find('cifar10') == (raw := world/'cache'/'data'/'CIFAR10'/'cifar-10-batches-bin')
    assert files_below(raw) == sorted(f'{f}.gz' for f in data.DATA['cifar10'].files)
    data._load.cache_clear()
    assert torch.equal(data.load('cifar10').train_x, d.train_x) and len(asked) == 1


@pytest.mark.parametrize('changes, says', [
    ({'cifar-10-batches-bin/test_batch.bin': b'other'}, 'unpacking gave sha256 .* for test_batch.bin'),
    ({'cifar-10-batches-bin/data_batch_3.bin': b''}, 'unpacking gave sha256 .* for data_batch_3.bin')])
def test_cifar_archive_with_other_files(world, monkeypatch, changes, says):
    b = toy_cifar(monkeypatch, **changes)
    (world/'own'/data.DATA['cifar10'].archive.name).write_bytes(b)
    with pytest.raises(data.DataError, match=says): data.load('cifar10')
    assert files_below(world/'cache') == []


def test_cifar_archive_that_is_none(world, monkeypatch):
    b = toy_cifar(monkeypatch)
    (f := world/'toy.tar.gz').write_bytes(b[:-200])
    names = tuple(data.DATA['cifar10'].files)
    with pytest.raises(data.DataError, match='not a whole tar.gz'): data._binaries(f, names)
    f.write_bytes(tar_bytes({}, [('x/data_batch_1.bin', '/etc/passwd')])) # a link is not followed
    with pytest.raises(data.DataError, match='lacks data_batch_1.bin, '): data._binaries(f, names)


def test_slow_packings_are_unpacked_once(world, monkeypatch):
    "What a large xz file gave is kept under the digest of the file; neither is believed."
    content = np.random.default_rng(0).bytes(1 << 12)
    packed, sha = lzma.compress(content, preset=0), hashlib.sha256(content).hexdigest()
    (f := world/'own'/'x.bin.xz').write_bytes(packed)
    assert data._read(f, sha) == content and files_below(world/'cache') == [] # small: not kept
    monkeypatch.setattr(data, 'LARGE', 1 << 10)
    assert data._read(f, sha) == content
    kept, = (world/'cache'/'unpacked').iterdir()
    monkeypatch.setitem(data.OPEN, '.xz', lambda b: pytest.fail('unpacked twice'))
    assert data._read(f, sha) == content
    kept.write_bytes(b'damaged')
    with pytest.raises(data.DataError, match='sha256 of its content'): data._read(f, sha)


MD5 = dict(zip(data.DATA['cifar10'].files, '''5dd7e06a14cb22eb9f671a540d1b7c25
5ea93a67294ea407fff1d09f752e9692 942cd6a4bcdd0dd3c604fbe906cb4421 ae636b3ba5c66a11e91e8cb52e771fcb
53f37980c15c3d472c316c40844f3f0d 803d5f7f4d78ea53de84dbe85f74fb6d'''.split())) # as published


@pytest.mark.skipif(not data.available('cifar10'), reason='CIFAR-10 is not on this machine')
def test_real_cifar():
    where, d = data.find('cifar10'), data.load('cifar10')
    for f, sha in data.DATA['cifar10'].files.items() if where.is_dir() else ():
        assert hashlib.md5(data._read(data._stored(where, f), sha)).hexdigest() == MD5[f]
    assert d.train_y.bincount().tolist() == [5000]*10 and d.test_y.bincount().tolist() == [1000]*10
    assert d.train_y[:8].tolist() == [6, 9, 9, 4, 1, 1, 2, 7] and d.test_y[:4].tolist() == [3, 8, 8, 0]
    assert d.train_x[0, [0, 1024, 2048]].tolist() == [59, 62, 63] # red, green and blue, top left


# The command ------------------------------------------------------------------------------------

def test_command_is_friendly_without_notmnist(world, capsys):
    mnist_into(world/'own')
    assert data.list_data() == 0
    out = capsys.readouterr().out
    assert 'notmnist' in out and 'bicl_data --download' in out
    row = next(r for r in out.splitlines() if r.startswith('mnist'))
    assert ' 60000  10000  yes ' in row
    assert '6903 7877 6990 7141 6824 6313 6876 7293 6825 6958' in row


def test_command_fails_on_damage(world, capsys):
    raw = mnist_into(world/'own')
    (raw/'train-labels-idx1-ubyte.gz').write_bytes(b'')
    assert data.list_data() == 1
    got = capsys.readouterr()
    assert ' NO ' in got.out and 'train-labels-idx1-ubyte.gz (0 bytes) is damaged' in got.err


def test_command_in_a_shell(world):
    "As installed: a process of its own, with an option."
    script = Path(sysconfig.get_path('scripts'))/'bicl_data'
    run = lambda *a: subprocess.run([script, *a], env=os.environ | {'BICL_DATA': ''},
                                    capture_output=True, text=True)
    ok, bad = run(), run('--uplaod')
    assert ok.returncode == 0 and 'data/FashionMNIST/raw' in ok.stdout and '7000 each' in ok.stdout
    assert bad.returncode == 2 and '--uplaod' in bad.stderr
