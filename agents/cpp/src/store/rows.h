// Rows of the store as MessagePack.
#pragma once

#include "store/store.h"
#include "wire/mqtt/messages.h"

namespace edgefl {

Bytes packed_outgoing(const Outgoing& outgoing);
Outgoing read_outgoing(std::string_view data);  // ProtocolError for one that another release wrote
Bytes packed_past(const PastRound& past);
PastRound read_past(std::string_view data);
Bytes packed_shape(const Shape& shape);
Shape read_shape(std::string_view data);
Scalars read_scalars(std::string_view data);
// As numpy writes a type with its byte order: "<f4".
std::string numpy_code(DType dtype);
DType dtype_of_code(const std::string& code);

}  // namespace edgefl
