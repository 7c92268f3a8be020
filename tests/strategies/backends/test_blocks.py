"""The blocks that FSDP shards and checkpointing recomputes, found without knowing the model."""

from __future__ import annotations

from torch import nn

from strategies.parallel.blocks import repeated_blocks
from tests.strategies.training_bodies import Block, TinyModel


class Layer(nn.Module):
    """A layer with experts inside."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)) for _ in range(3)])


def test_the_stack_of_a_decoder() -> None:
    model = TinyModel()
    assert repeated_blocks(model) == list(model.blocks)
    assert all(isinstance(block, Block) for block in repeated_blocks(model))


def test_encoder_and_decoder_in_order_and_experts_stay_inside() -> None:
    encoder = nn.ModuleList([Layer(), Layer()])
    decoder = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder, "head": nn.Linear(2, 2)})
    assert repeated_blocks(model) == [*encoder, *decoder]


def test_a_dictionary_with_numbers_is_a_stack_and_one_with_names_is_not() -> None:
    blocks = [nn.Sequential(nn.Linear(2, 2)) for _ in range(2)]
    assert repeated_blocks(nn.ModuleDict({str(index): block for index, block in enumerate(blocks)})) == blocks
    assert repeated_blocks(nn.ModuleDict(dict(zip(("image", "text"), blocks, strict=True)))) == []


def test_layers_in_a_row_are_not_blocks() -> None:
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []
    assert repeated_blocks(nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))) == []
