"""Weights out of files: Hugging Face folders, GGUF files and Stoker checkpoints, each as a source that fills a decoder.

Every file is foreign input: counts and sizes are checked before objects are made of them, names and shapes before
anything is read, and nothing is unpickled.

Reading order: `source.py` (`open_weights`), `loading.py` (from any store of tensors into a decoder's parts), then one
kind: `hugging_face.py` with `safetensors_header.py` and `direct.py` (threads that read straight into parameters);
`gguf_weights.py` with `gguf_header.py`, `gguf_file.py` and `gguf_tokenizer.py`; `checkpoint.py`.
"""
