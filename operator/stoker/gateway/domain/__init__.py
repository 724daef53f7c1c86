"""Pure translations: resources of the cluster into the answers of the REST API, and requests into resources."""
