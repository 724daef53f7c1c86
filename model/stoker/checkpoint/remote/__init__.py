"""Models that are not on this machine: the hub of Hugging Face, buckets, registries of OCI images.

`fetch_model` brings one into a folder that all processes of a machine share, once, whole and checked; `push_folder`
brings a folder there. A model is named by `hf://ORG/NAME[@REVISION]`, `s3://BUCKET/PREFIX` or
`oci://REGISTRY/REPOSITORY[:TAG|@DIGEST]`.

Reading order: `model_uri`, `listing` (what a source is), `model_cache`, then the three sources, `push`. No torch, and
nothing of the model is imported here; clients (huggingface_hub, obstore) are imported when they are used.
"""
