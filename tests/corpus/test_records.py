from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from layertap import InvalidInputError
from layertap.corpus import iter_records, verify_corpus
from layertap.corpus.plot import MissingPlotLibraryError, plot_norms, require_matplotlib
from layertap.corpus.records import record_paths
from layertap.corpus.statistics import record_statistics
from layertap.errors import CorruptRecordError
from layertap.record import HiddenStates, build_metadata
from layertap.sinks.base import RecordSpec
from layertap.sinks.file import FileSink


def write(folder: Path, name: str, hidden: torch.Tensor) -> Path:
    """A real record, by the real sink."""
    t, layers, _ = hidden.shape
    metadata = build_metadata(
        request_id=name, model="m", layer_ids=tuple(range(layers)), num_hidden_layers=8,
        storage_dtype=hidden.dtype, num_prompt_tokens=t, num_tokens=t, positions=range(t),
    )  # fmt: skip
    sink = FileSink(folder)
    writer = sink.open(
        RecordSpec(name, torch.arange(t), (t, layers, hidden.shape[2]), hidden.dtype, False, metadata)
    )
    writer.write(hidden)
    path = writer.commit()
    sink.close()
    return Path(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(6):
        write(tmp_path / "r", f"r{i}", torch.full((3, 2, 4), float(i + 1)))
    return tmp_path / "r"


def names(records: object) -> list[str]:
    return [r.request_id for r in records]  # type: ignore[attr-defined]


def test_records_come_by_name_shuffled_and_in_shards(folder: Path) -> None:
    everything = [f"r{i}" for i in range(6)]
    assert names(iter_records(folder)) == everything
    assert names(iter_records(folder, seed=1)) != everything
    assert sorted(names(iter_records(folder, seed=1))) == everything
    parts = [names(iter_records(folder, seed=1, shard=(i, 4))) for i in range(4)]
    assert sorted(name for part in parts for name in part) == everything
    assert names(iter_records(folder / "r3.safetensors")) == ["r3"]


def test_a_broken_record_is_raised_or_skipped_and_told_by_verify(folder: Path) -> None:
    (folder / "r2.safetensors").write_bytes(b"short")
    with pytest.raises(CorruptRecordError, match="r2"):
        list(iter_records(folder))
    assert names(iter_records(folder, on_broken="skip")) == ["r0", "r1", "r3", "r4", "r5"]
    data = bytearray((folder / "r4.safetensors").read_bytes())
    data[-1] ^= 8
    (folder / "r4.safetensors").write_bytes(data)
    assert "r4" in names(iter_records(folder, on_broken="skip"))
    assert "r4" not in names(iter_records(folder, on_broken="skip", verify=True))
    broken = {Path(s.path).stem: s.problem for s in verify_corpus(folder) if not s.ok}
    assert set(broken) == {"r2", "r4"}
    assert "cut off" in (broken["r2"] or "")


def test_wrong_arguments_are_refused(folder: Path) -> None:
    with pytest.raises(InvalidInputError, match="shard"):
        iter_records(folder, shard=(2, 2))
    with pytest.raises(InvalidInputError, match="on_broken"):
        iter_records(folder, on_broken="ignore")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="path"):
        record_paths(folder / "none")


def test_temporary_and_other_files_are_no_records(folder: Path) -> None:
    (folder / ".layertap-1-00.tmp").write_text("")
    (folder / "notes.txt").write_text("")
    assert len(record_paths(folder)) == 6


def test_statistics_find_the_outlier_and_the_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layertap.corpus.statistics._CHUNK_VALUES", 64)  # several chunks
    torch.manual_seed(0)
    hidden = torch.randn(20, 3, 8)
    hidden[13, 1, 5] = -99.0
    record = HiddenStates(
        torch.arange(20), hidden, layer_ids=(2, 7, "norm"), positions=tuple(range(100, 120))
    )
    found = record_statistics(record)
    torch.testing.assert_close(found.norms, hidden.norm(dim=-1))
    outlier = found.outlier
    assert (outlier.value, outlier.layer_id, outlier.position, outlier.dimension) == (-99.0, 7, 113, 5)
    assert found.mean_norms == pytest.approx(hidden.norm(dim=-1).mean(0).tolist(), rel=1e-6)


def test_statistics_apply_the_scales_of_float8() -> None:
    hidden = torch.full((2, 1, 4), 2.0).to(torch.float8_e4m3fn)
    scales = torch.tensor([1.0, 10.0]).view(2, 1, 1)
    found = record_statistics(HiddenStates(torch.arange(2), hidden, scales))
    assert found.norms.flatten().tolist() == [4.0, 40.0]
    assert (found.outlier.value, found.outlier.layer_id) == (20.0, None)


def test_statistics_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="no states"):
        record_statistics(HiddenStates(torch.zeros(0, dtype=torch.long), torch.zeros(0, 1, 4)))


@pytest.mark.parametrize(("tokens", "layers"), [(1, 1), (7, 4), (5000, 40)])
def test_a_heat_map_is_drawn_for_any_size(tmp_path: Path, tokens: int, layers: int) -> None:
    rng = np.random.default_rng(0)
    norms = rng.lognormal(3, 2, (tokens, layers)).astype(np.float32)
    path = tmp_path / "map.png"
    plot_norms(norms, [str(i) for i in range(layers)], range(7, 7 + tokens), "title", path)
    from PIL import Image

    with Image.open(path) as image:
        assert image.width > 700
        assert image.height > 300
        assert len(set(image.convert("RGB").resize((60, 30)).get_flattened_data())) > 5


def test_a_heat_map_of_equal_or_zero_norms_is_drawn(tmp_path: Path) -> None:
    plot_norms(np.zeros((3, 2), np.float32), ["0", "1"], [4, 9, 2], "title", tmp_path / "map.svg")
    assert (tmp_path / "map.svg").stat().st_size > 1000


def test_a_plot_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="--plot"):
        require_matplotlib(tmp_path / "map.xyz")
    with pytest.raises(InvalidInputError, match="--plot"):
        require_matplotlib(tmp_path / "none" / "map.png")


def test_without_matplotlib_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(MissingPlotLibraryError, match=r"layertap\[plot\]"):
        require_matplotlib("map.png")
