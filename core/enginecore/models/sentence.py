"""What a model's files say of pooling: sentence-transformers' modules, or a head for classification. No torch here.

A folder of sentence-transformers has modules.json: which modules a text goes through, in order, and the folder of
each's settings (`Transformer`, then `Pooling`, then perhaps `Dense` and `Normalize`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from enginecore.errors import ModelError, UnsupportedError
from enginecore.models.store import ModelFiles, read_json
from enginecore.pooling import POOLING_TYPES, PoolingModel

#: Heads that say something of a whole text.
_CLASSIFIER = "ForSequenceClassification"
#: Lengths from here on stand for none.
_NO_LIMIT = 2**24
#: Where the settings of the transformer are, by the kind of model in older folders.
_TRANSFORMER_FILES = (
    "sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json",
    "sentence_camembert_config.json", "sentence_xlm-roberta_config.json",
)  # fmt: skip


def pooling_model(files: ModelFiles, runner: str, overrides: dict[str, Any]) -> PoolingModel | None:
    """How the model of `files` pools, None when it is to generate text. `runner` "auto" goes by modules.json and the
    architecture that config.json names; `overrides` are an operator's. Raises ModelError and UnsupportedError."""
    if runner == "generate":
        return None
    names = files.config.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    folder = Path(files.path)
    modules = folder / "modules.json" if folder.is_dir() else None
    if architecture.endswith(_CLASSIFIER):
        return _classifier(files.config, overrides)
    if modules is not None and modules.is_file():
        return _sentence_model(files, folder, _modules(modules), overrides)
    bare = architecture.endswith("Model") and not architecture.endswith("LMHeadModel")
    if runner == "auto" and not bare and not architecture.endswith("ForMaskedLM"):
        return None
    causal = architecture.endswith(("ForCausalLM", "LMHeadModel")) or not architecture or _is_decoder(files.config)
    return _finish({"pooling_type": "lasttoken" if causal else "mean", "normalize": causal}, files.config, overrides)


def _is_decoder(config: dict[str, Any]) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return config.get("model_type") not in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def _modules(path: Path) -> list[dict[str, Any]]:
    """The modules, in order. (The file is a list, so `read_json` is not for it.)"""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise ModelError(f"{path} must hold a list of modules")
    return found


def _sentence_model(
    files: ModelFiles, folder: Path, modules: list[dict[str, Any]], overrides: dict[str, Any]
) -> PoolingModel:
    values: dict[str, Any] = {}
    dense: list[str] = []
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        place = folder / _inside(str(module.get("path") or ""), folder)
        if kind == "Transformer":
            values |= _transformer(place, files.name)
        elif kind == "Pooling":
            values |= _pooling(place)
        elif kind == "Dense":
            dense.append(str(module["path"]))
            values["dimensions"] = _positive(read_json(place / "config.json"), "out_features", place)
        elif kind == "Normalize":
            values["normalize"] = True
        elif kind != "Dropout":
            raise UnsupportedError(
                f"model {files.name!r} cannot be served", reasons=(f"its module {kind!r} is not known",)
            )
    if "pooling_type" not in values:
        raise ModelError(f"{folder / 'modules.json'} names no module of type Pooling")
    return _finish({**values, "dense": tuple(dense), "prefix": _prefix(folder)}, files.config, overrides)


def _inside(path: str, folder: Path) -> str:
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise ModelError(f"{folder / 'modules.json'} names a folder outside the model's: {path!r}")
    return path


def _transformer(place: Path, name: str) -> dict[str, Any]:
    """The longest text (newer files leave it to the tokenizer's), and whether it is lower-cased before the tokenizer
    sees it."""
    found = next((place / name for name in _TRANSFORMER_FILES if (place / name).is_file()), None)
    config = read_json(found) if found is not None else {}
    task = config.get("transformer_task", "feature-extraction")
    if task != "feature-extraction":
        raise UnsupportedError(f"model {name!r} cannot be served", reasons=(f"its transformer does {task!r}",))
    tokenizer = place / "tokenizer_config.json"
    longest = config.get("max_seq_length")
    if longest is None and tokenizer.is_file():
        longest = read_json(tokenizer).get("model_max_length")
    values: dict[str, Any] = {"lowercase": config.get("do_lower_case") is True}
    if type(longest) is int and 0 < longest < _NO_LIMIT:
        values["max_tokens"] = longest
    return values


def _prefix(folder: Path) -> str:
    """What the library puts before every text unless it is told otherwise."""
    path = folder / "config_sentence_transformers.json"
    config = read_json(path) if path.is_file() else {}
    prompts, name = config.get("prompts"), config.get("default_prompt_name")
    text = prompts.get(name) if isinstance(prompts, dict) and name is not None else None
    return text if isinstance(text, str) else ""


def _pooling(place: Path) -> dict[str, Any]:
    """One way of pooling; several side by side make a longer vector, which is not supported."""
    config = read_json(place / "config.json")
    mode = config.get("pooling_mode")  # newer files name it
    modes = [mode] if isinstance(mode, str) else list(mode or ())
    flags = {
        "pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_max_tokens": "max",
        "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "pooling_mode_lasttoken": "lasttoken",
        "pooling_mode_weightedmean_tokens": "weightedmean",
    }  # fmt: skip
    modes = modes or [name for flag, name in flags.items() if config.get(flag)] or ["mean"]
    if len(modes) != 1 or modes[0] not in POOLING_TYPES:
        told = f"pooling by {' and '.join(map(str, modes))} is not supported"
        raise UnsupportedError(f"{place / 'config.json'} cannot be followed", reasons=(told,))
    if config.get("include_prompt") is False:
        raise UnsupportedError(
            f"{place / 'config.json'} cannot be followed", reasons=("pooling without the prompt is not supported",)
        )
    return {"pooling_type": modes[0]}


def _finish(values: dict[str, Any], config: dict[str, Any], overrides: dict[str, Any]) -> PoolingModel:
    values.setdefault("dimensions", _positive(config, "hidden_size", Path("config.json"), "dim", "n_embd"))
    values["matryoshka"] = _matryoshka(config, overrides)
    values |= {name: overrides[name] for name in ("pooling_type", "normalize") if name in overrides}
    return PoolingModel(tasks=("embed", "token_embed"), **values)


def _positive(config: dict[str, Any], name: str, place: Path, *others: str) -> int:
    value = next((config[key] for key in (name, *others) if key in config), None)
    if type(value) is not int or value <= 0:
        raise ModelError(f"{place}: {name} is {value!r}; it must be a number above 0")
    return value


def _matryoshka(config: dict[str, Any], overrides: dict[str, Any]) -> tuple[int, ...] | None:
    """As in vLLM, a config.json has `matryoshka_dimensions` or `is_matryoshka`."""
    wanted = overrides.get("matryoshka")
    if wanted is None:
        wanted = config.get("matryoshka_dimensions") or config.get("is_matryoshka")
    if isinstance(wanted, list):
        return tuple(sorted(size for size in wanted if type(size) is int))
    return () if wanted is True else None


def _classifier(config: dict[str, Any], overrides: dict[str, Any]) -> PoolingModel:
    named = config.get("id2label")
    count = config.get("num_labels") if not isinstance(named, dict) else len(named)
    labels = [f"LABEL_{index}" for index in range(count if type(count) is int and count > 0 else 2)]
    if isinstance(named, dict):
        labels = [str(named.get(str(index), named.get(index, label))) for index, label in enumerate(labels)]
    activation = overrides.get("activation") or _activation(config, len(labels))
    return PoolingModel(tasks=("classify",), labels=tuple(labels), activation=str(activation))


def _activation(config: dict[str, Any], num_labels: int) -> str:
    """What sentence-transformers' CrossEncoder would do, where its settings are in config.json; else by the kind of
    problem; else sigmoid for one label and softmax for several."""
    own = config.get("sentence_transformers")
    function = own.get("activation_fn") if isinstance(own, dict) else None
    function = str(function or config.get("sbert_ce_default_activation_function") or "")
    for name in ("Identity", "Sigmoid", "Softmax"):
        if function.endswith(f".{name}"):
            return "none" if name == "Identity" else name.lower()
    kind = config.get("problem_type")
    if kind == "regression":
        return "none"
    if kind == "multi_label_classification" or (kind is None and num_labels == 1):
        return "sigmoid"
    return "softmax"
