"""Puts together what features do with the sampling parameters of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanovllm.data.parts import MissingPartError, load
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.text.prompts import EngineLimits
from nanovllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanovllm.text.forms import Forms


class Preparation:
    """Completes the sampling parameters of requests; see `InputProcessor`.

    Attributes:
        forms: prepares the forms of outputs; None: there is no structured output.
    """

    def __init__(self, tokenizer: Tokenizer, limits: EngineLimits) -> None:
        self.forms: Forms | None = None
        try:
            create: type[Forms] = load("nanovllm.text.forms:Forms", "structured_outputs")
            self.forms = create(tokenizer, limits)
        except MissingPartError as error:
            self._reason = str(error)

    def prepare(self, params: SamplingParams) -> SamplingParams:
        """Return complete sampling parameters.

        Raises:
            ValueError: the form of an output cannot be followed.
        """
        if self.forms is not None:
            return self.forms.prepare(params)
        if params.structured_outputs is not None:
            raise MissingPartError(self._reason)
        return params
