"""The checkpoint format: writing, publishing, reading, verifying, comparing and exporting checkpoints.

It owns every file of a checkpoint root; nothing else publishes or deletes one. It may import `stoker.pod`, numpy and
blake3, and no torch. Trainer and engine import it, and the operator runs it as task pods. docs/checkpoint-format.md
is the format, docs/life-of-a-checkpoint.md its use.

Reading order:

* `box.py`, `entries.py`, `manifest.py` (with `strict_json.py` and `dtype.py`): what a checkpoint holds.
* `cover.py`: the proof that its pieces cover every tensor exactly.
* `storage.py`, `file_lock.py`: the only code that opens files.
* `manifest_file.py`, `store.py` (publish, find, delete), `writer.py`, `reader.py`, `verify.py`.
* `facts.py`, `diff.py`, `export.py`; `command.py` for people, `task.py` for task pods.
"""
