"""What can go wrong in the engine, by name. `code` is what ends up in a stored error."""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error that the engine raises on purpose."""

    code = "engine_error"
    exit_code = 1
    """Of a command that meets it: 1, it failed; 2, the configuration must change."""


class Refused(EngineError):
    """Options are wrong. `problems` has one sentence for each thing that is; the message is all of them."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


class InvalidParams(Refused):
    """A sampling parameter is out of range or not supported; the message names it."""

    code = "invalid_params"


class PromptTooLong(EngineError):
    """Prompt and output can never fit: context length or KV cache."""

    code = "prompt_too_long"


class EmptyPrompt(EngineError):
    """A prompt without a single token has nothing to condition on."""

    code = "empty_prompt"


class SamplingFailed(EngineError):
    """No token can be sampled: every one is masked, or the model's logits are not numbers."""

    code = "sampling_failed"


class UnsupportedModel(EngineError):
    """The model needs something that the chosen backend does not honour."""

    code = "unsupported_model"
    exit_code = 2


class ModelNotFound(EngineError):
    """No model under that directory, hub id, file or alias."""

    code = "model_not_found"
    exit_code = 2


class InvalidConfig(Refused):
    """An engine option is out of range, or two options contradict each other."""

    code = "invalid_config"
    exit_code = 2


class RemoteCodeRefused(InvalidConfig):
    """The job asks to run code that comes with its model, and this machine does not allow it."""

    code = "remote_code_refused"


class NoSkipSet(InvalidConfig):
    """Nothing on this machine says what method self skips."""


class EngineStopped(EngineError):
    """The engine was closed, or its step loop failed, while the request was in flight."""

    code = "engine_stopped"
