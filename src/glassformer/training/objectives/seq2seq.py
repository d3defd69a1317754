from __future__ import annotations

from typing import ClassVar

import numpy as np

from glassformer.config import ModelConfig
from glassformer.text import Tokens
from glassformer.training.objectives.base import Asked, ObjectiveConfig, Opening, check_reading_on
from glassformer.training.objectives.pairs import PairBatches, Pairs, PairWindows, SourceLayout, check_pairs, refuse_cut


class Seq2seqConfig(ObjectiveConfig, kind="seq2seq"):
    """Sequence-to-sequence objective, to generate a target from its source: the mean of -log p(y_i | y_<i, x) over the
    tokens of the targets and their ends.

    Sutskever et al. 2014, 1409.3215; Vaswani et al. 2017, 1706.03762. Each document of the data is a pair, its source
    and its target with a tab between. An encoder reads the source; models without one read it before the target, with
    the tab between, and bidirectionally if they have a prefix. All are scored on equal targets. The head sets label
    smoothing.
    """

    continues: ClassVar[bool] = False
    one_length: ClassVar[bool] = False

    def check(self, config: ModelConfig) -> None:
        super().check(config)
        check_reading_on(config)

    def check_length(self, text: Tokens, context: int, config: ModelConfig | None = None) -> None:
        refuse_cut(text)
        for name, side in (("training", text.train), ("held-out", text.validation)):
            check_pairs(Pairs(side.tokens, text.tokenizer, SourceLayout.of(config)), context, name)

    def batches(
        self, text: Tokens, batch: int, context: int, seed: int, config: ModelConfig | None = None
    ) -> PairBatches:
        return PairBatches(Pairs(text.train.tokens, text.tokenizer, SourceLayout.of(config)), batch, seed)

    def evaluation(
        self, text: Tokens, context: int, max_tokens: int | None, batch: int, config: ModelConfig | None = None
    ) -> PairWindows:
        return PairWindows(Pairs(text.validation.tokens, text.tokenizer, SourceLayout.of(config)), max_tokens, batch)

    def opening(self, text: Tokens, length: int, config: ModelConfig) -> Opening:
        """Returns the source of the first held-out pair, for which a sample is generated."""
        return self.asked(text, 1, config)[0].opening

    def asked(self, text: Tokens, count: int, config: ModelConfig) -> list[Asked]:
        if not config.writes:
            return []
        pairs = Pairs(text.validation.tokens, text.tokenizer, SourceLayout.of(config))
        found = []
        for number in np.unique(np.linspace(0, len(pairs) - 1, min(count, len(pairs))).round().astype(int)):
            source, target = pairs[int(number)]
            begin = Opening(np.append(source, pairs.between))
            if pairs.layout.encoder:
                begin = Opening(np.array([pairs.end]), np.append(source, pairs.end))
            found.append(Asked(begin, source, target))
        return found
