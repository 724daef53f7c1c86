"""A repository of the Hugging Face hub, or of a server with its routes (`HF_ENDPOINT`), by huggingface_hub.

Only what a model needs is fetched: safetensors, config, tokenizer, chat template. A branch or tag is resolved to its
commit first, so that all files are of one state.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stoker.checkpoint.errors import CheckpointError, CheckpointMissing
from stoker.checkpoint.remote.listing import WRITTEN_BYTES, Environment, Listing, RemoteFile, checked_name
from stoker.checkpoint.remote.model_uri import ModelUri

SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".jinja")
TIMEOUT_S = 60
"""Longest wait for an answer about a repository or a file; the client's own 10 s are short for a busy server."""
DEFAULT_ENDPOINT = "https://huggingface.co"


def _is_wanted(name: str) -> bool:
    return name.endswith(SUFFIXES) and "/" not in name


class HubModel:
    """One revision of a repository."""

    def __init__(self, uri: ModelUri, environment: Environment) -> None:
        """Make the client; nothing is sent.

        Raises:
            CheckpointError: the package huggingface_hub is missing.
        """
        self.uri = uri
        self._endpoint = environment.get("HF_ENDPOINT") or DEFAULT_ENDPOINT
        self._token: str | bool = environment.get("HF_TOKEN") or False
        self._client = hub_client(str(uri))
        self._commit = ""

    def listing(self, is_wanted: Callable[[str], bool] = _is_wanted) -> Listing:
        """Return the files whose names are wanted: by default, those that a model needs."""
        api = self._client.HfApi(endpoint=self._endpoint, token=self._token)
        with hub_errors(self.uri):
            found = api.model_info(self.uri.place, revision=self.uri.revision, files_metadata=True, timeout=TIMEOUT_S)
        self._commit = str(found.sha)
        files = tuple(self._file(one) for one in found.siblings or () if is_wanted(one.rfilename))
        if not any(file.name.endswith(".safetensors") for file in files):
            raise CheckpointError(f"{self.uri}: no .safetensors file at commit {self._commit}")
        return Listing(f"commit:{self._commit}", files)

    def fetch(self, file: RemoteFile, target: Path) -> None:
        """The client keeps unfinished copies beside the target and goes on with them."""
        work = target.parent / ".hub" / file.name.replace("/", "--")
        with hub_errors(self.uri):
            done = self._client.hf_hub_download(
                self.uri.place,
                file.name,
                revision=self._commit,
                local_dir=work,
                endpoint=self._endpoint,
                token=self._token,
                etag_timeout=TIMEOUT_S,
            )
        Path(done).rename(target)
        shutil.rmtree(work, ignore_errors=True)

    def check(self, folder: Path) -> None:
        """Each file has its own hash."""

    def close(self) -> None:
        self._client.close_session()

    def _file(self, found: Any) -> RemoteFile:
        return RemoteFile(
            name=checked_name(found.rfilename, str(self.uri)),
            bytes=int(found.size or 0),
            sha256=found.lfs.sha256 if found.lfs else None,
            git_sha1=None if found.lfs else found.blob_id,
            version=str(found.blob_id or ""),
        )


def hub_client(uri: str) -> Any:
    """Import the client.

    Raises:
        CheckpointError: it is not installed.
    """
    try:
        import huggingface_hub
        from huggingface_hub import constants
    except ImportError as error:
        raise CheckpointError(f"{uri} needs the package huggingface_hub: pip install 'stoker[hub]'") from error
    constants.DOWNLOAD_CHUNK_SIZE = WRITTEN_BYTES  # its 10 MiB would show no progress of small files
    return huggingface_hub


@contextmanager
def hub_errors(uri: ModelUri) -> Iterator[None]:
    """Turn the client's errors into those of a checkpoint, or OSError where another try may help."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except GatedRepoError as error:
        raise PermissionError(
            f"{uri} is gated: its terms must be accepted, and HF_TOKEN must be of that user"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointMissing(f"{uri}: the revision {uri.revision} does not exist") from error
    except RepositoryNotFoundError as error:
        raise CheckpointMissing(f"{uri} does not exist, or is private and HF_TOKEN does not allow it") from error
    except (LocalEntryNotFoundError, HfHubHTTPError) as error:
        raise ConnectionError(f"{uri}: {str(error).strip().splitlines()[0]}") from error
    except OSError:
        raise
    except RuntimeError as error:  # around whatever broke off the upload of a file
        cause = str(error.__cause__ or "").strip().partition("\n")[0]
        raise ConnectionError(f"{uri}: {str(error).rstrip('.')}: {cause}") from error
    except Exception as error:  # the client's own HTTP library differs by version
        if "http" not in type(error).__module__:
            raise
        raise ConnectionError(f"{uri} cannot be reached: {error}") from error
