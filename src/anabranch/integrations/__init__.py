"""Use anabranch from other libraries: transformers and vLLM. Each module imports its library only when it is used."""
