"""One file per operator family: rules that rewrite training ops into core ops ONNX can express."""
