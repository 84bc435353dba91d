"""Models of a hub: names, downloads that continue, the cache, and what is said without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from outstride.errors import ModelNotFound
from outstride.models.hub import HubName, _gguf_files, _wanted, hub_name
from tests.models.checkpoints import make, save
from tests.models.hub_server import COMMITS, Hub, serving

DATA = np.random.default_rng(0).integers(0, 256, 300_000, dtype=np.uint8).tobytes()
CODE = """
import sys
import outstride.models.hub as hub
from outstride.errors import ModelError
from outstride.models.load import load, locate
import outstride.models.conversion_progress as progress
from huggingface_hub import constants
progress._INTERVAL = 0.001
hub._LARGE = constants.DOWNLOAD_CHUNK_SIZE = 1000  # the library writes whole chunks
name, what = sys.argv[1:]
try:
    print(locate(name) if what == "locate" else load(name, pages=4, weights="fp32").path)
except ModelError as error:
    print(type(error).__name__, error)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = save(make("llama"), tmp_path_factory.mktemp("hub") / "m")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(checkpoint: dict[str, bytes]) -> Iterator[Hub]:
    ggufs = {
        "README.md": b"#",
        "m-Q4_K_M.gguf": b"one" + DATA,
        "m-Q8_0.gguf": b"two" + DATA,
        "big/m-F16-00001-of-00002.gguf": b"three" + DATA,
        "big/m-F16-00002-of-00002.gguf": b"four" + DATA,
        "mmproj-F16.gguf": b"five",
    }
    extra = {"original/consolidated.00.pth": b"x", "original/params.json": b"{}"}
    with serving(Hub({"main": {**checkpoint, **extra}, "v2": ggufs})) as served:
        yield served


def run(
    name: str, hub: Hub | None, home: Path, what: str = "locate", **more: str
) -> tuple[str, str]:
    """What a new process prints on standard output and standard error."""
    address = "http://127.0.0.1:9" if hub is None else hub.address
    done = subprocess.run(
        [sys.executable, "-c", CODE, name, what],
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))},
            "HF_HOME": str(home),
            "HF_ENDPOINT": address,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "OUTSTRIDE_CACHE": str(home / "outstride"),
            **more,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def test_a_checkpoint_is_downloaded_once_and_loads_offline(hub: Hub, tmp_path: Path) -> None:
    found, _ = run("org/name", hub, tmp_path, "load")
    folder = Path(found)
    assert folder == tmp_path / "hub" / "models--org--name" / "snapshots" / COMMITS["main"]
    assert (folder / "model.safetensors").read_bytes() == hub.files["main"]["model.safetensors"]
    assert not (folder / "original").exists()
    assert not list(tmp_path.rglob("*.partial"))
    before = len(hub.asked)
    assert run("org/name", hub, tmp_path, "load")[0] == found
    assert len(hub.asked) == before
    assert run("org/name", None, tmp_path, "load", HF_HUB_OFFLINE="1")[0] == found


def test_a_download_that_broke_off_continues_in_the_next_process(hub: Hub, tmp_path: Path) -> None:
    hub.cut = "m-Q4_K_M.gguf", 100_000
    said, _ = run("org/name@v2:Q4_K_M", hub, tmp_path)
    assert said.startswith("DownloadFailed 'org/name@v2:Q4_K_M' is not in the cache")
    (partial,) = tmp_path.rglob("*.partial")
    assert partial.stat().st_size == 100_000
    hub.broken = False
    found, shown = run("org/name@v2:Q4_K_M", hub, tmp_path)
    assert Path(found).read_bytes() == hub.files["v2"]["m-Q4_K_M.gguf"]
    ranges = [r for method, path, r in hub.asked if method == "GET" and path.endswith(".gguf")]
    assert ranges[-1] == "bytes=100000-"
    assert "Downloading m-Q4_K_M.gguf: " in shown
    assert not list(tmp_path.rglob("*.partial"))


def test_a_file_with_the_wrong_checksum_is_not_kept(hub: Hub, tmp_path: Path) -> None:
    hub.cut = "m-Q8_0.gguf", 1000
    run("org/name@v2:Q8_0", hub, tmp_path)
    (partial,) = tmp_path.rglob("*.partial")
    partial.write_bytes(b"x" * 1000)
    hub.broken = False
    assert "wrong checksum" in run("org/name@v2:Q8_0", hub, tmp_path)[0]
    found, _ = run("org/name@v2:Q8_0", hub, tmp_path)
    assert Path(found).read_bytes() == hub.files["v2"]["m-Q8_0.gguf"]


def test_split_files_are_downloaded_together(hub: Hub, tmp_path: Path) -> None:
    found, _ = run("org/name@v2:f16", hub, tmp_path)
    first = Path(found)
    assert first.name == "m-F16-00001-of-00002.gguf"
    names = sorted(p.name for p in first.parent.iterdir())
    assert names == ["m-F16-00001-of-00002.gguf", "m-F16-00002-of-00002.gguf"]
    assert run("org/name@v2:F16", None, tmp_path, HF_HUB_OFFLINE="1")[0] == found
    assert not list(tmp_path.rglob("m-Q8_0.gguf"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("org/name@v2", "3 GGUF files.*F16, Q4_K_M, Q8_0"),
        ("org/name@v2:Q5_K_M", "no GGUF files 'Q5_K_M'.*Q4_K_M"),
        ("org/name@v9", "no revision 'v9'"),
        ("org/other", "no model 'org/other'"),
        ("org/name:Q4_0", "neither safetensors nor GGUF|no GGUF"),
    ],
)
def test_names_that_do_not_exist(name: str, says: str, hub: Hub, tmp_path: Path) -> None:
    assert re.search(f"ModelNotFound.*{says}", run(name, hub, tmp_path)[0])


def test_without_a_network_the_error_says_what_to_download_and_where_to_put_it(
    tmp_path: Path,
) -> None:
    said, _ = run("org/name:Q4_K_M", None, tmp_path, HF_HUB_OFFLINE="1")
    assert said.startswith("DownloadFailed")
    assert "HF_HUB_OFFLINE" in said
    assert "hf download org/name --include '*Q4_K_M*.gguf'" in said
    assert str(tmp_path / "hub" / "models--org--name") in said


def test_the_forms_of_names() -> None:
    assert hub_name("org/name") == HubName("org/name")
    assert hub_name("org/name@refs/pr/3") == HubName("org/name", "refs/pr/3")
    assert hub_name("org/na.me@v1:Q4_K_M") == HubName("org/na.me", "v1", "Q4_K_M")
    assert hub_name("org/name:q8_0") == HubName("org/name", None, "q8_0")
    for other in ("name", "a/b/c", "org/name@", "org/name:", "../name"):
        assert hub_name(other) is None
    assert str(HubName("org/name", "v1", "Q4_0")) == "org/name@v1:Q4_0"


def test_files_of_repositories() -> None:
    files = ["m.Q4_K_S.gguf", "m.Q4_K_M.gguf", "m.IQ4_XS.gguf", "m-UD-Q4_K_XL.gguf", "imatrix.gguf"]
    for kind in ("Q4_K_S", "q4_k_m", "IQ4_XS", "UD-Q4_K_XL", "Q4_K_XL"):
        assert kind.lower() in _gguf_files(HubName("o/n", None, kind), files)[0].lower()
    with pytest.raises(ModelNotFound, match="no GGUF"):
        _gguf_files(HubName("o/n", None, "Q4_K"), files)
    with pytest.raises(ModelNotFound, match="1 of 3 parts"):
        _gguf_files(HubName("o/n"), ["m-00002-of-00003.gguf"])
    mixed = ["config.json", "model.safetensors", "m.Q8_0.gguf", "consolidated.safetensors"]
    assert _wanted(HubName("o/n"), mixed) == ["config.json", "model.safetensors"]
    assert _wanted(HubName("o/n", None, "Q8_0"), mixed) == ["m.Q8_0.gguf"]
