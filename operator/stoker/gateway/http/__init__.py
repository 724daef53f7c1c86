"""Routes of the REST API. Each reads the cluster with the caller's rights and answers with a view."""
