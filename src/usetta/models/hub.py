"""Weights by name from the Hugging Face hub, or a mirror of it (`HF_ENDPOINT`), into its usual cache (`HF_HOME`).

huggingface_hub checks the size of what it downloaded but not the content, and keeps whatever it has in the cache. The
hub gives the SHA-256 of a large file as its ETag and the cache names the file after it, so the content is checked here
each time, and a file that fails is removed: the next attempt downloads it again.
"""

import errno
import hashlib
import re
from pathlib import Path

from usetta.models.base import ModelError

_SHA256 = re.compile(r"[0-9a-f]{64}")
_OTHERWISE = "use a local file (`--model FILE`) or the embedded model (`--model embedded`)"


class NotInRepositoryError(ModelError):
    """The repository exists and can be read, but has no such file."""


class NotInCacheError(ModelError):
    """The file was never downloaded and the hub cannot be asked."""


class DamagedFileError(ModelError):
    """A file in the cache was not what the hub has; it has been removed, so that it can be downloaded again."""


class _UnreachableError(Exception):
    """The hub does not answer; the cause says why."""


def download(
    repo: str,
    filename: str,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    offline: bool = False,
) -> Path:
    """The path of `filename` of a hub repository, from the cache or the network; `offline` allows the cache only."""
    from huggingface_hub import errors, hf_hub_download

    what = f"{filename} of {repo}"
    try:
        if not offline and not is_cached(repo, filename, cache_dir, revision):
            _ask(repo, filename, revision)
        path = Path(hf_hub_download(repo, filename, revision=revision, cache_dir=cache_dir, local_files_only=offline))
    except errors.HFValidationError:
        raise ModelError(
            f"'{repo}' is not a valid id of a hub repository, such as openai/clip-vit-base-patch16"
        ) from None
    except errors.GatedRepoError:
        raise ModelError(
            f"{repo} is gated: accept its terms on its page on the hub and run `hf auth login`; or {_OTHERWISE}"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"the hub has no repository {repo}, or it is private (then run `hf auth login`); or {_OTHERWISE}"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{repo} has no revision {revision}") from None
    except (errors.LocalEntryNotFoundError, _UnreachableError) as error:
        raise NotInCacheError(_unreachable(what, offline, error.__cause__ or error)) from None
    except errors.EntryNotFoundError:
        raise NotInRepositoryError(f"the hub repository {repo} has no file {filename}") from None
    except Exception as error:  # noqa: BLE001 - the HTTP library below huggingface_hub differs between its versions
        raise ModelError(_failed(what, error)) from None
    _verify(path, what)
    return path


def download_optional(
    repo: str, filename: str, *, revision: str | None = None, cache_dir: Path | None = None, offline: bool = False
) -> Path | None:
    """As `download`, but None where the repository (or, offline, the cache) lacks the file."""
    try:
        return download(repo, filename, revision=revision, cache_dir=cache_dir, offline=offline)
    except NotInRepositoryError:
        return None
    except NotInCacheError:
        if offline:
            return None
        raise


def is_cached(repo: str, filename: str, cache_dir: Path | None = None, revision: str | None = None) -> bool:
    """Whether `download` would need no network."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(repo, filename, cache_dir=cache_dir, revision=revision), str)


def _ask(repo: str, filename: str, revision: str | None) -> None:
    """One quick request to see whether the hub answers: `hf_hub_download` would retry an absent network for 24 s."""
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url

    try:
        get_hf_file_metadata(hf_hub_url(repo, filename, revision=revision))
    except (errors.HfHubHTTPError, errors.EntryNotFoundError, errors.FileMetadataError):
        return  # it answered; the download explains what the answer means
    except Exception as error:
        raise _UnreachableError from error


def _unreachable(what: str, offline: bool, cause: BaseException) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    if offline or isinstance(cause, OfflineModeIsEnabled):
        return f"{what} is not in the cache and offline mode forbids downloading it: go online once, or {_OTHERWISE}"
    return f"{what} is not in the cache and {constants.ENDPOINT} cannot be reached ({_reason(cause)}): {_OTHERWISE}"


def _failed(what: str, error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the disk is full: {what} could not be stored; free some space, or set HF_HOME to a larger disk"
    if isinstance(error, OSError) and "Consistency check failed" in str(error):
        return f"the download of {what} was cut off: try again, or {_OTHERWISE}"
    return f"the download of {what} failed ({_reason(error)}): try again, or {_OTHERWISE}"


def _reason(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _verify(path: Path, what: str) -> None:
    """Compare a file with the SHA-256 that its name in the cache states, if it states one."""
    stored = path.resolve()
    if not _SHA256.fullmatch(stored.name):
        return
    with stored.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != stored.name:
        stored.unlink()
        path.unlink(missing_ok=True)
        raise DamagedFileError(
            f"the download of {what} is corrupt: its SHA-256 is {actual[:12]}…, the hub says {stored.name[:12]}…; "
            f"the file was removed, try again"
        )
