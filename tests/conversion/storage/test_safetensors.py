"""Safetensors files against the reference implementation, in both directions."""

from __future__ import annotations

import json
import resource
import weakref
from pathlib import Path

import pytest
import safetensors.torch
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from glassformer.conversion.storage import DTYPES, SafetensorsFile, open_folder, open_tensors, write_safetensors
from glassformer.conversion.storage.join import PAGE
from glassformer.conversion.storage.quants import PIECE
from glassformer.errors import RequestError
from tests.refused import failed, refused

KNOWN = sorted(set(safetensors.torch._TYPES.values()), key=str)


def counted(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Returns a tensor of random bits (only 0 and 1 for booleans)."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape)


def same(a: Tensor, b: Tensor) -> bool:
    """Returns True if two tensors are equal in dtype, shape and every bit."""
    x, y = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(x, y)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NAMES = TEXT.filter(lambda name: name != "__metadata__")
METADATA = st.dictionaries(TEXT, TEXT, max_size=3)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
TENSORS = st.dictionaries(NAMES, st.builds(counted, st.sampled_from(KNOWN), SHAPES, st.integers(0, 99)), max_size=6)


@settings(max_examples=100, deadline=None)
@given(tensors=TENSORS, said=METADATA)
def test_files_of_the_reference_are_read(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Tensor], said: dict[str, str]
):
    path = tmp_path_factory.getbasetemp() / "theirs.safetensors"
    safetensors.torch.save_file(tensors, path, metadata=said or None)
    with open_tensors(path) as file:
        assert isinstance(file, SafetensorsFile) and file.metadata == said
        assert set(file.entries) == set(tensors)
        for name, tensor in tensors.items():
            assert same(file.tensor(name), tensor)
            out = torch.empty_like(tensor)
            file.read_into(name, out)
            assert same(out, tensor)
            assert same(file.packed(name).dequantize(tensor.dtype), tensor)


@settings(max_examples=100, deadline=None)
@given(tensors=TENSORS)
def test_written_files_equal_the_references_bytes(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Tensor]):
    folder = tmp_path_factory.getbasetemp() / "ours"
    write_safetensors(folder, tensors)
    written = (folder / "model.safetensors").read_bytes()
    assert written == safetensors.torch.save(tensors, metadata={"format": "pt"})


def test_an_old_file_without_padding_of_the_header(tmp_path: Path):
    header = b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}'
    assert len(header) % 4
    path = tmp_path / "x"
    path.write_bytes(len(header).to_bytes(8, "little") + header + torch.arange(3.0).numpy().tobytes())
    with open_tensors(path) as file:
        assert torch.equal(file.tensor("a"), torch.arange(3.0)) and file.tensor("a").data_ptr() % 4 == 0


def test_a_tensor_is_a_view_whose_changes_stay_in_memory(tmp_path: Path):
    write_safetensors(tmp_path, {"a": torch.zeros(4, 4), "b": torch.ones(4)})
    before = (tmp_path / "model.safetensors").read_bytes()
    with open_folder(tmp_path) as file:
        tensor, again = file.tensor("a"), file.tensor("a")
        tensor.fill_(7)
        assert torch.equal(again, tensor)  # the same memory
        assert tensor.untyped_storage().nbytes() == 64  # only its own bytes, because saving writes the whole storage
    assert torch.equal(tensor, torch.full((4, 4), 7.0))  # lives on when the file is closed
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_separate_tensors_are_mapped_as_one(tmp_path: Path):
    """Whole pages are mapped, pages that two tensors share are copied; writes do not reach the file."""
    rows = {"q": 640, "k": 320, "v": 320}
    for dtype in (torch.float32, torch.bfloat16):
        tensors = {f"{name}.weight": counted(dtype, (n, 512), n) for name, n in rows.items()}
        between = {f"{name}.then": counted(dtype, (PAGE,), 1) for name in rows}
        safetensors.torch.save_file({**tensors, **between}, tmp_path / "model.safetensors")
        before = (tmp_path / "model.safetensors").read_bytes()
        with open_tensors(tmp_path) as file:
            parts = [file.entry(name) for name in tensors]
            one = file.stacked(parts, (1280, 512))
        assert one is not None and same(one, torch.cat(list(tensors.values())))
        assert any(part.offset % PAGE for part in parts), "no page would be shared"
        one.view(torch.uint8).fill_(7)
        assert (tmp_path / "model.safetensors").read_bytes() == before


def test_tensors_of_several_files_are_mapped_as_one(tmp_path: Path):
    tensors = {name: counted(torch.float32, (512, 512), seed) for seed, name in enumerate("qkv")}
    write_safetensors(tmp_path, tensors, max_shard_bytes=1 << 20)
    with open_folder(tmp_path) as file:
        one = file.stacked([file.entry(name) for name in "qkv"], (1536, 512))
    assert one is not None and same(one, torch.cat(list(tensors.values())))


def test_tensors_that_pages_do_not_join_are_left_to_be_copied(tmp_path: Path):
    """Tensors at different offsets within their pages, and small ones, are not mapped as one matrix."""
    tensors = {
        "a": counted(torch.float32, (512, 512)),
        "b": counted(torch.float32, (3,)),
        "c": counted(torch.float32, (512, 512)),
    }
    tensors |= {"d": counted(torch.float32, (PAGE,)), "e": counted(torch.float32, (4, 4))}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with open_folder(tmp_path) as file:
        assert file.stacked([file.entry("a"), file.entry("c")], (1024, 512)) is None
        assert file.stacked([file.entry("e"), file.entry("e")], (8, 4)) is None


def test_a_file_larger_than_memory_is_mapped(tmp_path: Path):
    size = 1 << 42  # 4 TiB, a sparse file with only the header on the disk
    header = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path = tmp_path / "sparse.safetensors"
    with open(path, "wb") as made:
        made.write(len(header).to_bytes(8, "little") + header)
        try:
            made.truncate(8 + len(header) + size)
        except OSError:
            pytest.skip("the disk holds no sparse files of this size")
    with open_tensors(path) as file:
        assert file.tensor("a")[-1] == 0 and file.packed("a")[size - 2 :].bytes.tolist() == [0, 0]


@pytest.mark.parametrize("theirs", ["F32", "BF16", "F16", "F64", "I32", "U8", "F8_E4M3"])
@pytest.mark.parametrize("ours", [torch.float32, torch.bfloat16, torch.float16])
def test_read_into_any_dtype_rows_and_strides(tmp_path: Path, theirs: str, ours: torch.dtype):
    values = torch.randint(0, 100, (40, 24), generator=torch.Generator().manual_seed(0)).to(DTYPES[theirs])
    write_safetensors(tmp_path, {"before": torch.ones(3, dtype=torch.uint8), "w": values})
    wanted = values.to(ours)
    with open_folder(tmp_path) as file:
        stacked = torch.zeros(120, 24, dtype=ours)
        file.read_into("w", stacked[40:80])
        assert torch.equal(stacked[40:80], wanted) and not stacked[:40].any() and not stacked[80:].any()
        file.read_into("w", stacked[:7], rows=slice(10, 17))
        assert torch.equal(stacked[:7], wanted[10:17])
        transposed = torch.zeros(24, 40, dtype=ours)
        file.read_into("w", transposed.T)
        assert torch.equal(transposed, wanted.T)
        columns = torch.zeros(40, 48, dtype=ours)
        file.read_into("w", columns[:, 24:], rows=None)
        assert torch.equal(columns[:, 24:], wanted) and not columns[:, :24].any()
        parameter = torch.nn.Parameter(torch.zeros(40, 24, dtype=ours))
        file.read_into("w", parameter)
        assert torch.equal(parameter, wanted)
        with refused(code="conflict", field="out"):
            file.read_into("w", transposed)
        file.read_into("w", torch.empty(40, 24, device="meta"))
        with refused(code="missing", field="tensor 'v'"):
            file.read_into("v", transposed)


@pytest.mark.parametrize("shape", [(PIECE + 5,), (3, PIECE - 1), (2, PIECE // 2 + 7, 2)])
def test_read_into_joins_pieces(tmp_path: Path, shape: tuple[int, ...]):
    values = torch.arange(torch.Size(shape).numel()).remainder(251).view(shape).to(torch.bfloat16)
    write_safetensors(tmp_path, {"w": values})
    with open_folder(tmp_path) as file:
        out = torch.empty(shape)
        file.read_into("w", out)
        assert torch.equal(out, values.float())
        reversed_strides = torch.empty(shape[::-1]).permute(*range(len(shape))[::-1])
        file.read_into("w", reversed_strides)
        assert torch.equal(reversed_strides, values.float())


def test_read_into_a_scalar_on_another_device(tmp_path: Path):
    write_safetensors(tmp_path, {"s": torch.tensor(3.0)})
    with open_folder(tmp_path) as file:
        file.read_into("s", torch.empty((), device="meta"))
        out = torch.zeros(2, 2, dtype=torch.float64)
        file.read_into("s", out[1, 1])
        assert out.tolist() == [[0, 0], [0, 3]]
        with refused(code="range", field="rows"):
            file.read_into("s", out[1, 1], rows=slice(0, 1))


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux for the resident size")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_read_into_holds_no_more_than_a_few_mib(tmp_path: Path, dtype: torch.dtype):
    write_safetensors(tmp_path, {"w": torch.ones(48 << 20, dtype=torch.bfloat16)})
    out = torch.zeros(48 << 20, dtype=dtype)
    out.fill_(2)  # its pages are there before
    with open_folder(tmp_path) as file:
        file.read_into("w", out[: 1 << 20], rows=slice(0, 1 << 20))
        before = resident()
        file.read_into("w", out)
        assert resident() - before < 8 << 20  # of 96 MiB
    assert out.sum(dtype=torch.float64) == 48 << 20


# Folders

STATE = {f"layers.{i}.w": counted(torch.float32, (i + 1, 10), i) for i in range(8)} | {
    "head": counted(torch.bfloat16, (30, 10)),
    "scale": counted(torch.float16, ()),
}


def test_shards_and_index_are_those_of_hugging_face(tmp_path: Path):
    write_safetensors(tmp_path, STATE, max_shard_bytes=500)
    split = split_torch_state_dict_into_shards(STATE, filename_pattern="model{suffix}.safetensors", max_shard_size=500)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": split.metadata["total_size"]}, "weight_map": split.tensor_to_filename}
    assert {path.name for path in tmp_path.iterdir()} == {*split.filename_to_tensors, "model.safetensors.index.json"}
    for name, keys in split.filename_to_tensors.items():
        loaded = safetensors.torch.load_file(tmp_path / name)
        assert set(loaded) == set(keys) and all(same(loaded[key], STATE[key]) for key in keys)
    with open_tensors(tmp_path) as file:
        assert set(file.entries) == set(STATE) and file.metadata == {"format": "pt"}
        assert all(same(file.tensor(name), tensor) for name, tensor in STATE.items())
        out = torch.empty(30, 10)
        file.read_into("head", out)
        assert same(out, STATE["head"].float())
        with refused(code="missing", field="tensor 'x'"):
            file.tensor("x")


class Made:
    """A source that counts how many of its kind are alive."""

    alive = most = 0

    def __init__(self, shape: tuple[int, ...], makes: tuple[int, ...] | None = None):
        self.shape, self.dtype, self.makes = shape, torch.float32, makes or shape

    def __call__(self) -> Tensor:
        tensor = torch.full(self.makes, float(self.shape[0]))
        Made.alive += 1
        Made.most = max(Made.most, Made.alive)
        weakref.finalize(tensor, Made.gone)
        return tensor

    @classmethod
    def gone(cls) -> None:
        cls.alive -= 1


def test_sources_are_made_one_at_a_time(tmp_path: Path):
    write_safetensors(tmp_path, {f"{i}": Made((i, 3)) for i in range(1, 9)}, max_shard_bytes=100)
    assert Made.most == 1
    with open_folder(tmp_path) as file:
        assert all(torch.equal(file.tensor(str(i)), torch.full((i, 3), float(i))) for i in range(1, 9))


def test_a_source_that_makes_another_shape_is_refused_and_nothing_is_written(tmp_path: Path):
    with pytest.raises(ValueError, match=r"shape \(3, 2\) made a tensor of shape \(2, 2\)"):
        write_safetensors(tmp_path, {"a": Made((3, 2), (2, 2))})
    assert not list(tmp_path.iterdir())


def test_writing_converts_views_and_replaces_old_files(tmp_path: Path):
    base = torch.arange(24.0).view(4, 6)
    (tmp_path / "config.json").write_text("{}")
    write_safetensors(tmp_path, {"a": base, "b": base}, max_shard_bytes=50)
    assert len(list(tmp_path.iterdir())) == 4
    write_safetensors(tmp_path, {"t": base.T, "c": base[:, 1:3], "p": torch.nn.Parameter(base[0])})
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert torch.equal(loaded["t"], base.T) and torch.equal(loaded["c"], base[:, 1:3])
    write_safetensors(tmp_path, {"a": base, "b": base}, max_shard_bytes=50)
    assert not (tmp_path / "model.safetensors").exists()
    with open_folder(tmp_path) as file:
        assert set(file.entries) == {"a", "b"}


def test_a_dtype_that_the_format_lacks_is_one_sentence(tmp_path: Path):
    with refused(code="unsupported", field="tensor 'a'.dtype"):
        write_safetensors(tmp_path, {"a": torch.zeros(1, dtype=torch.complex128)})


def test_failed_write_keeps_the_old_files(tmp_path: Path):
    write_safetensors(tmp_path, {"a": torch.ones(3)})
    before = (tmp_path / "model.safetensors").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with failed(code="disk"):
            write_safetensors(tmp_path, {"a": torch.ones(3), "b": torch.ones(1 << 20)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before
    (tmp_path / "file").write_text("")
    with failed(code="disk"):
        write_safetensors(tmp_path / "file", {"a": torch.ones(3)})


def test_a_file_cut_while_it_is_read_is_one_sentence(tmp_path: Path):
    write_safetensors(tmp_path, {"a": torch.ones(1000)})
    with open_folder(tmp_path) as file:
        with open(tmp_path / "model.safetensors", "r+b") as other:
            other.truncate(300)
        with failed(code="changed"):
            file.read_into("a", torch.empty(1000))
        with failed(code="disk"):
            file.tensor("a")


def test_missing_files_of_a_folder_are_named(tmp_path: Path):
    with refused(code="missing", field="model.safetensors"):
        open_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(RequestError, match=r"pytorch_model.bin is a pickle.*torch.load\('pytorch_model.bin', weights"):
        open_tensors(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    (tmp_path / "x.gguf").touch()
    with pytest.raises(RequestError, match=r"give 'x\.gguf'"):
        open_tensors(tmp_path)
    with refused(code="missing", field="model.safetensors"):
        open_folder(tmp_path / "nowhere")
