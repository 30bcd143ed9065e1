"""Finds or fetches a model: a name, a folder or a hub id becomes a local folder in Hugging Face
format."""

import threading
from pathlib import Path

from nanovllm.checkpoint.files import read_json
from nanovllm.checkpoint.home import ModelNotFoundError
from nanovllm.data.checks import did_you_mean
from nanovllm.data.config import COURSE_MODEL
from nanovllm.data.parts import needed_for

# Weights that the loader cannot read: Mistral's own layout, and fine-tuned adapters; and folders
# with other formats. Only templates are read from a folder: additional_chat_templates.
_IGNORED_FILES = [
    "*/*.safetensors",
    "*/*.json",
    "*/*.txt",
    "*/tokenizer.model",
    "consolidated*.safetensors",
    "adapter_model.safetensors",
]
ADAPTER_FILE = "adapter_config.json"  # of a LoRA adapter
# Suffix of GGUF files, in small or capital letters.
_GGUF = ".gguf"
_HUB_FILES = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja", "*.txt"]


def resolve_model(
    name: str, revision: str | None = None, stop: threading.Event | None = None
) -> Path:
    """The local folder of a model in Hugging Face format, fetched first if necessary.

    Args:
        name: `smollm2-135m` (the course model), a local folder, a GGUF file or a folder with one,
            or a Hugging Face hub id ("org/model").
        revision: branch, tag or commit of a hub id; ignored for the others.
        stop: ends the conversion of a GGUF file soon after it is set, in another thread.

    Raises:
        ModelNotFoundError: there is no such model, it is not in Hugging Face format, or it cannot
            be fetched.
    """
    if name == COURSE_MODEL:
        with needed_for(f"{COURSE_MODEL}, which is shipped as a GGUF file,"):
            from nanovllm.checkpoint.course_model import fetch_course_model
        return fetch_course_model(stop)
    folder = Path(name).expanduser()
    if folder.is_dir():
        file = _only_gguf_file(folder)
        return _checked_folder(folder) if file is None else _converted(file, stop)
    if folder.is_file():
        if _is_gguf(folder):
            return _converted(folder, stop)
        raise ModelNotFoundError(
            f"model {name!r} is a file; give the folder that holds config.json and the weights, or "
            "a GGUF file"
        )
    looks_like_path = name.startswith(("~", ".")) or folder.is_absolute() or name.count("/") > 1
    if looks_like_path or folder.suffix.lower() == _GGUF:
        raise ModelNotFoundError(
            f"there is no folder or file {name!r}; check the path to the model"
        )
    return _download_from_hub(name, revision)


def _is_gguf(file: Path) -> bool:
    return file.suffix.lower() == _GGUF and file.is_file()


def _only_gguf_file(folder: Path) -> Path | None:
    """The GGUF file of a folder without weights in Hugging Face format. None if there is none.

    Raises:
        ModelNotFoundError: there are several.
    """
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return None
    files = sorted(file for file in folder.iterdir() if _is_gguf(file))
    if len(files) > 1:
        raise ModelNotFoundError(
            f"the folder '{folder}' has several GGUF files, and no config.json with *.safetensors: "
            f"name one of {', '.join(file.name for file in files)}"
        )
    return files[0] if files else None


def _converted(file: Path, stop: threading.Event | None) -> Path:
    """The folder that a GGUF file is converted to."""
    with needed_for("a GGUF file"):
        from nanovllm.checkpoint.gguf_model import convert_once
    return convert_once(file, stop)


def _download_from_hub(name: str, revision: str | None) -> Path:
    """Download a snapshot of the hub's repository `name` into Hugging Face's own cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        folder = snapshot_download(
            name, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=_IGNORED_FILES
        )
    except (HFValidationError, OSError) as error:
        # No such model or revision, no access, no network, a full disk.
        # The rest of a message repeats, in general words, what follows here.
        reason = str(error).partition("\n")[0].rstrip(".")
        hint = did_you_mean(name.lower(), [COURSE_MODEL])
        raise ModelNotFoundError(
            f"the model {name!r} could not be downloaded: {reason}{hint}; check the name "
            "(https://huggingface.co/models), the network and HF_HUB_OFFLINE, or use "
            f"{COURSE_MODEL!r} or a local folder. A model with restricted access needs its "
            "licence to be accepted there, and `hf auth login`"
        ) from error
    return _checked_folder(Path(folder))


def _checked_folder(folder: Path) -> Path:
    """Return `folder` if it is in Hugging Face format, else raise ModelNotFoundError."""
    if (folder / "config.json").is_file():
        return folder
    if (adapter := folder / ADAPTER_FILE).is_file():
        base = read_json(adapter).get("base_model_name_or_path")
        of_base = f" {base!r}" if isinstance(base, str) else ""
        raise ModelNotFoundError(
            f"the folder '{folder}' is a LoRA adapter, and adapters are not supported: load its "
            f"base model{of_base} with peft, merge the adapter into it with merge_and_unload(), "
            "save the result with save_pretrained(), and give that folder"
        )
    raise ModelNotFoundError(
        f"the folder '{folder}' has no config.json; it should contain this file, *.safetensors and "
        "the tokenizer's files, as save_pretrained writes them, or one GGUF file"
    )
