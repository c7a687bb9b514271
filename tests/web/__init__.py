"""The exported graphs in onnxruntime-web, the runtime of browsers, driven in Node."""
