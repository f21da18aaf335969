"""Sharing out work by rank: every item in exactly one shard, and clear errors for impossible ranks."""

import itertools
from typing import Any

import pytest

from usetta.cli.engines import read_shard
from usetta.distributed import RayEngine, Shard


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_every_item_is_in_exactly_one_shard(world_size: int) -> None:
    shares = [list(Shard(rank, world_size).take(range(20))) for rank in range(world_size)]
    assert sorted(itertools.chain(*shares)) == list(range(20))
    for rank, share in enumerate(shares):
        assert all(item % world_size == rank for item in share)


def test_an_endless_stream_is_read_no_further_than_needed() -> None:
    read: list[int] = []

    def stream() -> Any:
        for number in itertools.count():
            read.append(number)
            yield number

    share = Shard(1, 3).take(stream())
    assert [next(share), next(share)] == [1, 4]
    assert read == [0, 1, 2, 3, 4]


def test_a_shard_names_its_folder_and_knows_whether_it_is_everything() -> None:
    assert (Shard(2, 12).name, Shard(2, 12).is_whole) == ("2-of-12", False)
    assert Shard().is_whole


@pytest.mark.parametrize(
    ("rank", "world_size", "message"),
    [
        (2, 2, "rank 2 is out of range: with world size 2, ranks go from 0 to 1"),
        (-1, 2, "rank -1 is out of range"),
        (0, 0, "the world size must be at least 1, not 0"),
    ],
)
def test_impossible_shards_are_refused(rank: int, world_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Shard(rank, world_size)


@pytest.mark.parametrize(
    ("environment", "shard"),
    [
        ({}, Shard()),
        ({"RANK": "1", "WORLD_SIZE": "4"}, Shard(1, 4)),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "5"}, Shard(3, 5)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, Shard()),
        # torchrun inside of Slurm, whose own task is the only one
        ({"RANK": "1", "WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, Shard(1, 4)),
        # a step that srun started, and the batch script around it
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "5"}, Shard(3, 5)),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "5"}, Shard()),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, Shard()),
    ],
)
def test_the_variables_of_launchers(environment: dict[str, str], shard: Shard) -> None:
    assert Shard.from_environment(environment=environment) == shard
    assert Shard.from_environment(0, 2, environment) == Shard(0, 2), "flags win"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "1"}, "RANK is set but WORLD_SIZE is not; give both or neither"),
        ({"SLURM_NTASKS": "4"}, "SLURM_NTASKS is set but SLURM_PROCID is not"),
        ({"RANK": "one", "WORLD_SIZE": "4"}, "variable RANK should be a whole number, not 'one'"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "rank 4 is out of range"),
    ],
)
def test_half_a_pair_and_nonsense_are_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Shard.from_environment(environment=environment)


def test_flags_come_in_pairs_and_are_refused_with_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert read_shard(None, None) == Shard(1, 2)
    assert read_shard(2, 3) == Shard(2, 3)
    with pytest.raises(ValueError, match="--rank is set but --world-size is not"):
        read_shard(0, None)
    with pytest.raises(ValueError, match="--world-size is set but --rank is not"):
        read_shard(None, 2)
    assert read_shard(None, None, RayEngine()) == Shard(), "the driver does everything"
    with pytest.raises(ValueError, match="cannot be combined with --engine ray"):
        read_shard(0, 2, RayEngine())
