"""The boards on which ranks leave notes: files of one node, and the store of several."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from strategies.distributed.environment import Environment
from strategies.supervision import stopping as boards
from strategies.supervision.stopping import FileBoard, StoreBoard, open_board


def test_notes_are_replaced_and_absent_ones_are_none(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=2))
    for board in (FileBoard(tmp_path / "board"), StoreBoard(store, "run/")):
        assert board.get("stop") is None
        board.put("stop", "once")
        board.put("stop", "again")
        board.put("armed-0", "")
        assert (board.get("stop"), board.get("armed-0"), board.get("armed-1")) == ("again", "", None)


def test_notes_that_cannot_be_left_are_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "board").touch()
    board = FileBoard(tmp_path / "board")
    for _ in range(2):
        board.put("stop", "x")
    assert capsys.readouterr().err.count("cannot leave each other notes") == 1


def test_a_board_that_is_gone_behaves_like_an_empty_one(tmp_path: Path) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=2))
    board = StoreBoard(_client(server.port), "run/")
    board.put("stop", "x")
    del server
    board.put("stop", "y")
    assert board.get("stop") is None
    (tmp_path / "file").touch()
    nowhere = FileBoard(tmp_path / "file" / "board")
    nowhere.put("stop", "x")
    assert nowhere.get("stop") is None


@pytest.mark.parametrize("of_node", [1, 2])
def test_ranks_of_nodes_of_unequal_size_take_the_same_board(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, of_node: int
) -> None:
    monkeypatch.setattr(boards, "_connect", object)
    monkeypatch.setattr(boards, "objects_of_all", lambda own: [own])
    assert isinstance(open_board(tmp_path, _environment(3, of_node)), StoreBoard)
    assert isinstance(open_board(tmp_path, _environment(of_node, of_node)), FileBoard)


def _environment(ranks: int, of_node: int) -> Environment:
    device = torch.device("cpu")
    return Environment(rank=0, local_rank=0, world_size=ranks, local_world_size=of_node, device=device)


def _client(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2))
