"""A hub of models in this process, in memory: the routes that huggingface_hub calls to list, fetch and push.

Connections can be cut in the middle of a file, and a private repository needs the token.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from testing.checkpoint.memory_server import MemoryHandler, MemoryServer

TOKEN = "hf_OnlyForTests"
Files = dict[str, bytes]


@dataclass
class Repository:
    """Commits by id, branches by name."""

    private: bool = False
    commits: dict[str, Files] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files: Files, branch: str = "main") -> str:
        """Add a commit with the files of the branch and these; return its id."""
        present = {**self.commits.get(self.branches.get(branch, ""), {}), **files}
        text = json.dumps({name: hashlib.sha256(data).hexdigest() for name, data in sorted(present.items())})
        commit = hashlib.sha1(f"{len(self.commits)} {text}".encode()).hexdigest()
        self.commits[commit], self.branches[branch] = present, commit
        return commit


class HubServer(MemoryServer):
    """The server, from `with` to its end."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.fetched: list[str] = []
        """`FILE from OFFSET` of each request for a file's bytes."""
        self.cut_after: int | None = None
        """Bytes after which answers with files end too early."""
        self.refuses_uploads = False
        """Whether large files are refused, as by a store whose quota is used up."""

    def add(self, name: str, files: Files, *, private: bool = False) -> str:
        """Add a repository, or a commit to it; return the commit."""
        found = self.repositories.setdefault(name, Repository(private))
        return found.commit(files)


class _Handler(MemoryHandler):
    owner: HubServer

    def _serve(self) -> None:
        body = self._body()
        path = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        if path[:2] == ["api", "repos"]:
            self._create(json.loads(body))
        elif path[0] == "api":
            self._api("/".join(path[2:4]), path[4:], body)
        elif path[0] == "upload" and self.owner.refuses_uploads:
            self._fail(403, "", "no more room")
        elif path[0] == "upload":
            self.owner.blobs[hashlib.sha256(body).hexdigest()] = body
            self._json({})
        elif path[1].endswith(".git"):
            self._batch(json.loads(body))
        else:
            self._file("/".join(path[:2]), path[3], "/".join(path[4:]))

    def _create(self, wanted: dict[str, Any]) -> None:
        if not self._has_token():
            self._fail(401, "", "the token is wrong")
            return
        name = f"{wanted.get('organization')}/{wanted['name']}"
        private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
        repository = self.owner.repositories.setdefault(name, Repository(private))
        if not repository.branches:
            repository.commit({})
        self._json({"url": f"{self.owner.endpoint}/{name}"})

    def _api(self, name: str, rest: list[str], body: bytes) -> None:
        repository = self._repository(name)
        if repository is None:
            return
        if rest[0] == "preupload":
            files = json.loads(body)["files"]
            modes = [
                {"path": one["path"], "shouldIgnore": False, "uploadMode": "lfs" if _large(one["path"]) else "regular"}
                for one in files
            ]
            self._json({"files": modes})
        elif rest[0] == "commit":
            commit = repository.commit(self._committed(body), rest[1])
            self._json({"commitUrl": f"{self.owner.endpoint}/{name}/commit/{commit}", "commitOid": commit})
        else:
            self._info(name, repository, rest[1] if len(rest) > 1 else "main")

    def _committed(self, body: bytes) -> Files:
        files = {}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.owner.blobs[value["oid"]]
        return files

    def _info(self, name: str, repository: Repository, revision: str) -> None:
        commit = repository.branches.get(revision, revision)
        if commit not in repository.commits:
            self._fail(404, "RevisionNotFound", f"no revision {revision}")
            return
        siblings = [_sibling(file, data) for file, data in repository.commits[commit].items()]
        self._json({"id": name, "modelId": name, "sha": commit, "siblings": siblings, "private": repository.private})

    def _batch(self, wanted: dict[str, Any]) -> None:
        objects = [
            {**one, "actions": {"upload": {"href": f"{self.owner.endpoint}/upload/{one['oid']}"}}}
            for one in wanted["objects"]
        ]
        self._json({"transfer": "basic", "objects": objects})

    def _file(self, name: str, commit: str, file: str) -> None:
        repository = self._repository(name)
        if repository is None:
            return
        data = repository.commits[repository.branches.get(commit, commit)].get(file)
        if data is None:
            self._fail(404, "EntryNotFound", f"no file {file}")
            return
        start = self._first_byte()
        headers = {
            "X-Repo-Commit": commit,
            "ETag": f'"{hashlib.sha256(data).hexdigest() if _large(file) else _git_hash(data)}"',
            "Accept-Ranges": "bytes",
        }
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if self.command != "HEAD":
            self.owner.fetched.append(f"{file} from {start}")
        self._answer(206 if start else 200, data[start:], headers, self.owner.cut_after)

    def _repository(self, name: str) -> Repository | None:
        found = self.owner.repositories.get(name)
        if found is not None and (not found.private or self._has_token()):
            return found
        self._fail(401, "RepoNotFound", f"no repository {name}")
        return None

    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _fail(self, status: int, code: str, message: str) -> None:
        self._answer(status, b"", {"X-Error-Code": code, "X-Error-Message": message})


def _large(name: str) -> bool:
    return name.endswith(".safetensors")


def _git_hash(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


def _sibling(name: str, data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": _git_hash(data)}
    if _large(name):
        found["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return found
