"""Records on the disk: whole or set aside, in order, one owner at a time, and never more than there is room for."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollstream.producers import spill as module
from rollstream.producers.spill import BLOCK, Kept, Spill, Spilled, SpillError

ROOM = 1 << 20
Open = Callable[..., Spill]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "spill"


@pytest.fixture
def opened(folder: Path) -> Iterator[Open]:
    """`opened(limit=ROOM)`: a worker's place in the folder; closed at the end."""
    spills: list[Spill] = []

    def make(limit: int = ROOM) -> Spill:
        spills.append(Spill(folder, limit=limit))
        return spills[-1]

    yield make
    for spill in spills:
        spill.close()


def record(number: int, size: int = 100) -> Spilled:
    value = number.to_bytes(4) * (size // 4)
    return Spilled(topic="t.maze", key=b"g\x00", headers={"group": b"\xff", "n": b"%d" % number}, value=value)


def files(folder: Path, kind: str) -> list[Path]:
    return list(folder.rglob(f"*.{kind}"))


async def keep(spill: Spill, *numbers: int) -> list[Kept]:
    kept = [await spill.keep(spill.number(), record(number)) for number in numbers]
    assert None not in kept
    return [one for one in kept if one is not None]


async def read_left(spill: Spill) -> list[Spilled]:
    return [await spill.read(kept) for kept in spill.left]


async def test_what_is_kept_comes_back_as_it_was_until_it_is_dropped(opened: Open) -> None:
    spill = opened()
    first, second = await keep(spill, 1, 2)
    assert (await spill.read(second), await spill.read(first)) == (record(2), record(1))
    assert spill.used == 2 * BLOCK
    await spill.drop(first)
    assert (spill.used, first.path.exists(), second.path.exists()) == (BLOCK, False, True)
    spill.close()
    again = opened()
    assert await read_left(again) == [record(2)]
    assert again.used == BLOCK


async def test_the_order_is_kept_beyond_a_restart_and_new_ones_come_last(opened: Open) -> None:
    spill = opened()
    await keep(spill, *range(12))
    spill.close()
    again = opened()
    assert await read_left(again) == [record(number) for number in range(12)]
    early = again.number()
    (late,) = await keep(again, 13)
    await again.keep(early, record(12))
    assert late.path > again.left[-1].path
    again.close()
    assert await read_left(opened()) == [record(number) for number in range(14)]


async def test_two_workers_never_share_and_whoever_comes_takes_what_the_dead_left(opened: Open) -> None:
    first, second = opened(), opened()
    await keep(first, 1, 2)
    (third,) = await keep(second, 3)
    assert third.path.parent.name == "1"
    assert not opened().left, "both live"
    second.close()
    heir = opened()
    assert await read_left(heir) == [record(3)]
    first.close()
    heir.close()
    assert await read_left(opened()) == [record(1), record(2), record(3)]


async def test_a_killed_worker_leaves_its_place_to_the_next(folder: Path, opened: Open) -> None:
    script = f"""
        import asyncio, sys, time
        from pathlib import Path
        from rollstream.producers.spill import Spill, Spilled

        async def main():
            spill = Spill(Path({str(folder)!r}), limit=1 << 20)
            await spill.keep(spill.number(), Spilled(topic="t", key=b"k", headers={{}}, value=b"v"))
            (Path({str(folder)!r}) / "0" / "7.half.draft").write_bytes(b"half a rec")
            print("kept", flush=True)
            time.sleep(600)

        asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE) as worker:  # noqa: ASYNC220 - nothing else is on the loop
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"kept\n"
        assert not opened().left, "it lives"
        worker.send_signal(signal.SIGKILL)
    spill = opened()
    assert [one.value for one in await read_left(spill)] == [b"v"]
    assert not files(folder, "draft"), "what was never whole is gone"


async def test_every_torn_or_flipped_file_is_set_aside_and_told(opened: Open) -> None:
    spill = opened(limit=1 << 30)
    (first,) = await keep(spill, 1)
    whole = first.path.read_bytes()
    flipped = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))]
    damages = [*(whole[:at] for at in range(len(whole))), *flipped, whole + b"x", whole * 2]
    for number, damage in enumerate(damages, 1):
        (kept,) = await keep(spill, 2)
        kept.path.write_bytes(damage)
        with pytest.raises(SpillError, match=r"expected a record as it was written"):
            await spill.read(kept)
        assert not kept.path.exists()
        assert kept.path.with_suffix(".damaged").read_bytes() == damage
        assert spill.damaged == number
    assert spill.used == BLOCK
    spill.close()
    assert await read_left(opened()) == [record(1)], "what is set aside is not delivered later either"


async def test_a_process_short_of_files_reads_it_later_and_sets_nothing_aside(
    folder: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    spill, read, refusals = opened(), Path.read_bytes, [errno.EMFILE, errno.ENFILE]

    def short(path: Path) -> bytes:
        if refusals:
            raise OSError(refusals.pop(), "too many open files", str(path))
        return read(path)

    (kept,) = await keep(spill, 1)
    monkeypatch.setattr(Path, "read_bytes", short)
    monkeypatch.setattr(module, "PAUSE", 0.01)
    assert await spill.read(kept) == record(1)
    assert not files(folder, "damaged")


async def test_a_file_that_is_gone_is_told_too(opened: Open) -> None:
    spill = opened()
    (kept,) = await keep(spill, 1)
    kept.path.unlink()
    with pytest.raises(SpillError, match="No such file"):
        await spill.read(kept)
    assert spill.used == 0


async def test_past_the_limit_nothing_is_kept_until_there_is_room(opened: Open) -> None:
    spill = opened(limit=3 * BLOCK)
    kept = await keep(spill, 1, 2, 3)
    assert await spill.keep(spill.number(), record(4)) is None
    await spill.drop(kept[0])
    assert await spill.keep(spill.number(), record(4, size=BLOCK)) is None, "it takes two blocks"
    await keep(spill, 4)
    spill.close()
    small = opened(limit=BLOCK)
    assert len(small.left) == 3, "what is there is taken over in any case"
    assert await small.keep(small.number(), record(5)) is None


@pytest.mark.parametrize("call", ["fsync", "open"])
async def test_a_full_disk_leaves_nothing_half_done(
    folder: Path, opened: Open, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    spill = opened()
    await keep(spill, 1)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)  # of the file, and of the folder that holds its name
        with pytest.raises(OSError, match="No space left"):
            await spill.keep(spill.number(), record(2))
    assert (spill.used, len(files(folder, "record"))) == (BLOCK, 1)
    await keep(spill, 3)
    spill.close()
    assert await read_left(opened()) == [record(1), record(3)]
    assert not files(folder, "draft")


def test_a_file_that_the_system_cuts_short_leaves_nothing(folder: Path) -> None:
    """A quota, as a process can set one on itself."""
    script = f"""
        import asyncio, resource
        from pathlib import Path
        from rollstream.producers.spill import Spill, Spilled

        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

        async def main():
            spill = Spill(Path({str(folder)!r}), limit=1 << 30)
            for size in (1_000, 50_000, 1_000):
                try:
                    await spill.keep(spill.number(), Spilled(topic="t", key=b"k", headers={{}}, value=b"v" * size))
                except OSError as error:
                    print(error.strerror, spill.used)
            spill.close()

        asyncio.run(main())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert done.stdout == f"File too large {BLOCK}\n"
    assert len(files(folder, "record")) == 2
    assert not files(folder, "draft")


def test_a_folder_of_no_use_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpillError, match=r"worker\.spill: expected a folder .* worker\.spill_bytes to 0"):
        Spill(tmp_path / "file", limit=ROOM)
