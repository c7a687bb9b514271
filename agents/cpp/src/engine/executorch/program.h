// A program of ExecuTorch in memory: first its ports can be asked for, then it is prepared, then it runs on memory of the
// caller. Nothing of ExecuTorch is seen here.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "wire/blob_ref.h"
#include "wire/errors.h"
#include "wire/tensor.h"

namespace edgefl {

struct ProgramError : EngineError {  // what the runtime said
  using EngineError::EngineError;
};

struct ProgramValue {
  std::optional<DType> dtype;  // none: a type that no port has
  Shape shape;
  bool planned = false;   // the program keeps its memory, so that nobody can give it any
  bool permuted = false;  // laid out in another order than rows first
};

class Program {
 public:
  // Once in a process, before the first program: loads kernels and delegates, and sets the threads of the one pool.
  static void prepare_process(int threads);

  explicit Program(Bytes artifact);
  ~Program();

  const std::vector<ProgramValue>& inputs() const;
  const std::vector<ProgramValue>& outputs() const;
  int64_t planned_bytes() const;  // of the arena that was planned at export
  void prepare();                 // allocates the arena, looks up kernels, sets up delegates
  // A pointer for each value; an output may be the memory of an input.
  void run(void* const* inputs, void* const* outputs);

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace edgefl
