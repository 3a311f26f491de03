"""The reward-model server: requests over HTTP, put together into forwards of one model."""
