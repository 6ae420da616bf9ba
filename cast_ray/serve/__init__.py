"""Engine replicas on Ray Serve behind an OpenAI-compatible API. The engines are those of a batch job."""
