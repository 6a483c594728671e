"""Downloads, from a server of our own: checked, whole or not at all."""

import hashlib
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import official
from official import left, same
from pathprox.experiments import data
from pathprox.experiments.data import Source, corrupted, fetch, load, sources

ROOT = Path(__file__).parent.parent


class Handler(SimpleHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        if not self.path.startswith("/half/"):
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"x" * 500)
        return None

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Serves the folder ``served``, and under ``half/`` files that break off."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    (tmp_path / "served").mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=tmp_path / "served")) as http:
        http.asked, http.files = [], tmp_path / "served"
        http.address = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield http
        http.shutdown()
        thread.join()


def published(server, name, *before):
    """The sources of a set as this server has them, tried after other folders of it."""
    return {
        name: [
            Source(
                source.path,
                "sha256:" + hashlib.sha256((server.files / source.path).read_bytes()).hexdigest(),
                tuple(f"{server.address}/{folder}{source.path}" for folder in (*before, "")),
                source.instead,
            )
            for source in data.SOURCES[name]
        ]
    }


def serve(server, name):
    if name == "cifar10":
        official.write_cifar10(server.files, train=50, test=10)
        official.pack(server.files, "cifar-10-batches-bin", "cifar-10-binary.tar.gz")
    elif name == "mnist-c":
        official.write_mnist_c(server.files, 10)
        official.pack(server.files, "mnist_c", "mnist_c.zip")
    elif name == "cifar10-c":
        official.write_cifar10_c(server.files, 2)
        official.pack(server.files, "CIFAR-10-C", "CIFAR-10-C.tar")
    else:
        {"mnist": official.write_mnist, "svhn": official.write_svhn}[name](server.files, 50, 10)
    return published(server, name)


@pytest.mark.parametrize("name", data.SOURCES)
def test_what_is_fetched_can_be_read_and_is_fetched_once(server, tmp_path, name, capsys):
    base = serve(server, name)
    folder = tmp_path / "new/data"
    assert fetch(name, folder, base) == [folder / source.path for source in base[name]]
    assert ("non-commercial" in capsys.readouterr().err) == (name == "svhn")
    if name in data.NAMES:
        assert len(load(name, folder).test) == 10
    else:
        assert corrupted(name, folder).missing == ()
    asked = len(server.asked)
    assert fetch(name, folder, base) == []
    for source in base[name]:
        if source.instead and not source.path.startswith("mnist/"):
            (folder / source.path).unlink()  # the archive, unpacked meanwhile
    assert fetch(name, folder, base) == []
    assert len(server.asked) == asked


def test_load_fetches_only_what_is_missing_and_only_when_asked(server, tmp_path, monkeypatch):
    monkeypatch.setitem(sources.SOURCES, "mnist", serve(server, "mnist")["mnist"])
    official.write_mnist(tmp_path, 50, 10)
    (tmp_path / "mnist/train-images-idx3-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError, match="train-images"):
        load("mnist", tmp_path)
    assert server.asked == []
    assert same(load("mnist-100", tmp_path, download=True), load("mnist-100", server.files))
    assert server.asked == ["/mnist/train-images-idx3-ubyte.gz"]


def test_the_mirrors_are_tried_in_turn(server, tmp_path):
    serve(server, "svhn")
    (server.files / "other/svhn").mkdir(parents=True)
    (server.files / "other" / "svhn/train_32x32.mat").write_bytes(b"other")
    base = published(server, "svhn", "gone/", "half/", "other/")
    fetch("svhn", tmp_path / "data", base)
    tried = [
        f"/{folder}svhn/{part}_32x32.mat" for part in ("train", "test") for folder in ("gone/", "half/", "other/", "")
    ]
    assert server.asked == tried
    assert len(left(tmp_path / "data")) == 2
    assert len(load("svhn", tmp_path / "data").test) == 10


@pytest.mark.parametrize(
    ("where", "kind"), [("half", ConnectionError), ("gone", ConnectionError), ("wrong", ValueError)]
)
def test_a_failed_download_leaves_nothing_and_says_what_to_do(server, tmp_path, where, kind):
    (server.files / "wrong").mkdir()
    (server.files / "wrong/file.gz").write_bytes(b"wrong")
    address = f"{server.address}/{where}/file.gz"
    base = {"mnist": [Source("mnist/file.gz", "md5:" + hashlib.md5(b"right").hexdigest(), (address,))]}
    with pytest.raises(kind, match=r"file\.gz could not be fetched.*`pathprox data fetch mnist`") as caught:
        fetch("mnist", tmp_path / "data", base)
    assert address in str(caught.value)
    assert str(tmp_path / "data/mnist/file.gz") in str(caught.value)
    assert left(tmp_path / "data") == []
    assert not (tmp_path / "data/mnist").exists()


def test_without_a_network_the_place_and_the_address_are_told(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    nobody = "http://127.0.0.1:9/train.mat"
    monkeypatch.setitem(sources.SOURCES, "svhn", (Source("svhn/train_32x32.mat", "md5:0", (nobody,)),))
    with pytest.raises(ConnectionError, match="pathprox data fetch svhn") as caught:
        load("svhn", tmp_path, download=True)
    assert nobody in str(caught.value)
    assert str(tmp_path / "svhn/train_32x32.mat") in str(caught.value)


def test_without_pooch_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ImportError, match=r"pip install 'pathprox\[experiments\]'"):
        fetch("mnist", tmp_path)


def test_reading_needs_numpy_alone(tmp_path):
    official.write_mnist(tmp_path, 20, 10)
    official.write_mnist_c(tmp_path, 10)
    code = (
        "import sys; from pathlib import Path\n"
        "for name in ('pooch', 'requests', 'rich', 'scipy', 'typer', 'matplotlib'): sys.modules[name] = None\n"
        "from pathprox.experiments.data import corrupted, load\n"
        "folder = Path(sys.argv[1])\n"
        "assert len(load('mnist', folder, download=True).test) == 10\n"
        "assert len(list(corrupted('mnist-c', folder).parts())) == 15\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code, str(tmp_path)], check=True, timeout=100)


def test_every_official_source_has_a_hash_and_an_address():
    for source in (source for group in data.SOURCES.values() for source in group):
        kind, _, digest = source.hash.partition(":")
        assert len(bytes.fromhex(digest)) == {"md5": 16, "sha256": 32}[kind]
        assert all(address.endswith(Path(source.path).name) for address in source.addresses)
