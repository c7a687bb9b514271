"""Codecs as objects, with their options: ``FedPAQ(bits=3)``, ``TopK(keep=0.01)``."""

from __future__ import annotations

from edgefl.codecs import catalog as codecs
from edgefl.contract.choice import CodecChoice, built_upon

Dense = built_upon(CodecChoice, "dense", "Dense", codecs.dense)
Float16 = built_upon(CodecChoice, "float16", "Float16", codecs.half)
BFloat16 = built_upon(CodecChoice, "bfloat16", "BFloat16", codecs.half)
Int8 = built_upon(CodecChoice, "int8", "Int8", codecs.int8)
FedPAQ = built_upon(CodecChoice, "fedpaq", "FedPAQ", codecs.fedpaq)
SignSGD = built_upon(CodecChoice, "signsgd", "SignSGD", codecs.signsgd)
ScaledSign = built_upon(CodecChoice, "scaled_sign", "ScaledSign", codecs.scaled_sign)
EFSignSGD = built_upon(CodecChoice, "ef_signsgd", "EFSignSGD", codecs.ef_signsgd)
NoisySignSGD = built_upon(CodecChoice, "noisy_signsgd", "NoisySignSGD", codecs.noisy_signsgd)
StocSignSGD = built_upon(CodecChoice, "stoc_signsgd", "StocSignSGD", codecs.stoc_signsgd)
TopK = built_upon(CodecChoice, "topk", "TopK", codecs.topk)
ZeroFL = built_upon(CodecChoice, "zerofl", "ZeroFL", codecs.zerofl)
BiFL = built_upon(CodecChoice, "bifl", "BiFL", codecs.bifl)
BiFLFull = built_upon(CodecChoice, "bifl_full", "BiFLFull", codecs.bifl_full)
