"""Convolutions, and ops between them, on a blocked layout: channels in blocks of a register's size.

onnxruntime has kernels for that, the domain ``com.microsoft.nchwc``, and takes them by itself where weights are constants.
In training they are inputs. So the graph brings inputs and weights into that layout itself, with the op that onnxruntime has
for inputs, which knows how large a block is.

* An input x [N, C, H, W] becomes [N][C/b][H W][b] by ReorderInput.
* A weight w [O, C, h, w] becomes [O][C/b][h w][b] by ReorderInput. Seen as [1, O, C h w, 1], a second one makes it
  [O/b][C/b][h w][b][b].

What a convolution gives stays in that layout as long as what reads it has a form there
(:mod:`edgefl_export.onnx.blocked.images`), and comes out of it where something else reads it. All of these forms run on
as many threads as there are, and each thread finds in its cache what it made itself.
"""
