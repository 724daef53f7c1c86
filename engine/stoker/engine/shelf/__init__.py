"""Several models behind one port: the folders of a directory are listed, loaded and unloaded by request.

Each loaded model is a whole engine, with a core process of its own; a request goes to the front of the model that it
names. For `stoker serve --models-dir`; under an operator a replica serves one model.

Reading order: `folders`, `room` (pure: what must go before a model fits), `shelf`, `program`.
"""
