"""The embedded cluster: an object store, and pods as processes of this machine.

Owns the API server's rules (`objects.py`), the files that they are stored in, and the life of each pod. An object is
changed in memory only after it was written. Everything is used by one event loop in one process, the supervisor
(`service.local`).

May import `domain` and the cluster's interface. Processes, probes, clock and the writing of files are passed in.

Reading order:
* objects: `objects.py`, `object_body.py`, `owner_index.py`, `watch_history.py`, `merge.py`, `builtin.py`,
`object_metadata.py`, `local_cluster.py`
* their storage: `object_storage.py`, `object_files.py`, `whole_file.py`
* pods: `pod_life.py`, `pod_schedule.py`, `pod_command.py`, `pod_status.py`, `pod_status_writer.py`, `pod_end.py`,
`probes.py`
* processes: `process.py`, `shim.py`
* names and paths: `addresses.py`, `rewrite.py`, `volumes.py`, `pod_environment.py`
* the state folder: `folders.py`, `state_lock.py`, `socket_path.py`, `reservations.py`
"""
