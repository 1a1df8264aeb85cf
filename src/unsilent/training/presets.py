"""The sizes of model that ``unsilent train`` offers."""

from __future__ import annotations

from dataclasses import dataclass

from unsilent.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A LLaMA's widths, and the sequence length and samples per rank that suit it (both may be overridden).

    A vocabulary above 256 leaves rows unused on byte-level text; it is there because the figures to compare with are of
    models with 32,000 tokens.
    """

    name: str
    hidden_size: int
    layers: int
    heads: int
    ffn_size: int
    vocabulary: int
    sequence_length: int = 128
    samples_per_rank: int = 4

    @property
    def parameters(self) -> int:
        """How many parameters the model has; input and output embeddings are not tied."""
        attention, ffn, norms = 4 * self.hidden_size**2, 3 * self.hidden_size * self.ffn_size, 2 * self.hidden_size
        return 2 * self.vocabulary * self.hidden_size + self.layers * (attention + ffn + norms) + self.hidden_size


TINY = Preset(name="tiny", hidden_size=128, layers=4, heads=4, ffn_size=344, vocabulary=256)
M25 = Preset(name="25m", hidden_size=512, layers=8, heads=8, ffn_size=1376, vocabulary=256)
M60 = Preset(name="60m", hidden_size=512, layers=8, heads=8, ffn_size=1376, vocabulary=32_000, sequence_length=256)
M350 = Preset(name="350m", hidden_size=1024, layers=24, heads=16, ffn_size=2736, vocabulary=32_000, sequence_length=256)
B1 = Preset(name="1b", hidden_size=2048, layers=24, heads=32, ffn_size=5461, vocabulary=32_000, sequence_length=256)

PRESETS: dict[str, Preset] = {preset.name: preset for preset in (TINY, M25, M60, M350, B1)}


def preset(name: str) -> Preset:
    """The preset of that name."""
    if name not in PRESETS:
        raise UsageError(f"there is no preset {name!r}: one of {', '.join(PRESETS)}")
    return PRESETS[name]
