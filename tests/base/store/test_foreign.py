"""What people, editors and dying disks leave in a run folder."""

import pytest
from msgspec.structs import replace

from hpc_swe.base.errors import CorruptRecord
from hpc_swe.base.records import Manifest, Node
from hpc_swe.base.store import atomic, folders
from hpc_swe.base.store.parquet import tasks
from hpc_swe.base.store.spool import STATES
from tests.kit.scripted import SMALL
from tests.kit.store_samples import FILES, publish, request, shown, spool

FOREIGN = (
    "README",
    ".DS_Store",
    "train-000000-00~0~",
    "#train-000000-00~0#",
    ".~lock.x#",
    "x.~1~",
    "x~",
    "~0",
    "x~00",
    "x~-1",
    "x~\u00b2",
    "x~\u0661",
    "x~1_0",
    "x~1.5",
    "x~0\n",
    "x~0~a~b",
)


@pytest.fixture
def littered(tmp_path):
    made = spool(tmp_path)
    for state in STATES:
        for name in FOREIGN:
            (tmp_path / state / name).write_text("not yours")
        (tmp_path / state / "folder").mkdir()
        (tmp_path / state / "folder" / "train-000000-00~0").write_text("not yours")
    (tmp_path / "ready" / "claimed~by~hand").write_text("not yours")
    (tmp_path / "ready" / "misplaced~0~w").write_text("not yours")
    (tmp_path / "claimed" / "misplaced~0").write_text("not yours")
    (tmp_path / "notes.txt").write_text("not yours")
    return made


def test_foreign_files_are_never_touched_and_stop_nobody(littered, tmp_path):
    before = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    for index in range(10):
        littered.put(request(index).name, request(index))
    claims = list(littered.claims("w"))
    assert len(claims) == 10
    assert claims[0].finish()
    assert claims[1].give_back()
    assert len(littered.recover(lambda address: True, max_losses=0)) == 8
    for address in littered.addresses("ready"):
        littered.read(address)
        littered.remove(address)
    for address in littered.addresses("dead"):
        (tmp_path / "dead" / address.ready).unlink()
    assert {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"\x80", b'{"json": 1}', b"\x85\xa5split"],
    ids=["empty", "bad", "{}", "json", "cut"],
)
def test_a_corrupt_message_is_buried_and_its_worker_goes_on(tmp_path, data):
    made = spool(tmp_path, messages=2)
    (tmp_path / "ready" / f"{request(0).name}~0").write_bytes(data)
    assert [claim.message.seed for claim in made.claims("w")] == [1]
    assert shown(tmp_path / "dead") == [f"{request(0).name}~0"]
    assert len(shown(tmp_path / "claimed")) == 1


@pytest.mark.parametrize("name", ["w.json", "w"])
@pytest.mark.parametrize("size", [0, 1, 20], ids="{} bytes".format)
def test_a_cut_off_cell_names_its_file_and_what_to_do(tmp_path, name, size):
    cell = tmp_path / name
    atomic.put(cell, Node(owner="w", role="rollout", beat=1, host="h", pid=1))
    cell.write_bytes(cell.read_bytes()[:size])
    with pytest.raises(CorruptRecord, match=rf"{cell}: not a Node: .*move it away"):
        atomic.get(cell, Node)


def test_a_cell_of_another_record_names_the_field(tmp_path):
    atomic.put(tmp_path / "cell.json", request())
    with pytest.raises(CorruptRecord, match=r"cell\.json: not a Node: .*(unknown|missing).*field"):
        atomic.get(tmp_path / "cell.json", Node)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "399 bytes, not the 400"),
        (lambda path: path.write_bytes(b"x" + path.read_bytes()[1:]), "its sha256 is not the manifest"),
        (lambda path: path.unlink(), "listed in the manifest, but missing"),
    ],
    ids=["cut off", "a byte changed", "missing"],
)
def test_a_file_that_is_not_as_published_is_refused_by_name(tmp_path, damage, message):
    publish(tmp_path / "v1")
    damage(tmp_path / "v1" / "rank_0000.msgpack")
    listed = folders.manifest(tmp_path / "v1", Manifest)
    with pytest.raises(CorruptRecord, match=rf"{tmp_path}/v1/rank_0000\.msgpack: {message}"):
        folders.read(tmp_path / "v1", "rank_0000.msgpack", listed)
    assert folders.read(tmp_path / "v1", "rank_0001.msgpack", listed) == FILES["rank_0001.msgpack"]


def test_a_file_that_the_manifest_does_not_list_is_refused(tmp_path):
    publish(tmp_path / "v1")
    (tmp_path / "v1" / "extra").write_bytes(b"")
    with pytest.raises(
        CorruptRecord, match=r"v1/extra: not in .*it lists rank_0000\.msgpack, rank_0001\.msgpack"
    ):
        folders.read(tmp_path / "v1", "extra", folders.manifest(tmp_path / "v1", Manifest))


def test_no_flipped_bit_changes_the_tasks_of_a_run(tmp_path):
    made = tmp_path / "tasks.parquet"
    words = [" ".join(str(number * seed % 97) for seed in range(40)) for number in range(20)]
    known = {
        "train": [replace(SMALL, task_id=f"t{i}", prompt=text) for i, text in enumerate(words)],
        "eval": [],
    }
    tasks.write(made, known)
    data, refused = made.read_bytes(), 0
    for place in range(4, len(data), 7):
        made.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        try:
            found = tasks.read(made)
        except CorruptRecord:
            refused += 1
        else:
            assert found == known, place
    assert refused


def test_a_folder_that_retention_removed_is_gone_and_not_corrupt(tmp_path):
    publish(tmp_path / "v1")
    listed = folders.manifest(tmp_path / "v1", Manifest)
    folders.remove(tmp_path / "v1")
    with pytest.raises(FileNotFoundError):
        folders.read(tmp_path / "v1", "rank_0000.msgpack", listed)
    with pytest.raises(FileNotFoundError):
        folders.manifest(tmp_path / "v1", Manifest)
    assert list(tmp_path.iterdir()) == [], "the bytes are freed"


def test_everything_works_below_a_weird_path(weird_tmp_path):
    made = spool(weird_tmp_path / "requests", messages=2)
    (claim, other) = made.claims("w")
    assert claim.finish()
    assert other.give_back()
    publish(weird_tmp_path / "v1")
    listed = folders.manifest(weird_tmp_path / "v1", Manifest)
    assert folders.read(weird_tmp_path / "v1", "rank_0000.msgpack", listed) == FILES["rank_0000.msgpack"]
    (weird_tmp_path / "v1" / "rank_0000.msgpack").unlink()
    with pytest.raises(CorruptRecord) as error:
        folders.read(weird_tmp_path / "v1", "rank_0000.msgpack", listed)
    assert str(weird_tmp_path) in str(error.value)
    folders.remove(weird_tmp_path / "v1")
    assert shown(weird_tmp_path) == [f"requests/ready/{other.name}~0"]
