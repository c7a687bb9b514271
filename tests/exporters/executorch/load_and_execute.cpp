// Steps of a program with nothing but ExecuTorch's Module::load and Module::execute, which is all that its Kotlin and Java
// classes for Android call.
//
//   load_and_execute MODEL PORTS STEPS
//
// PORTS is text: the number of inputs; of each its file of raw bytes, its element type as ExecuTorch numbers it, its rank and
// its sizes; then the number of outputs; of each the input that it takes the place of in the next step (-1: none) and the
// file that it is written to after the last. No name of a file holds a space.

#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>

using executorch::extension::Module;
using executorch::extension::TensorPtr;
using executorch::runtime::Error;
using executorch::runtime::EValue;

namespace {

constexpr size_t kBeyond = 64;  // XNNPACK's kernels may read beyond the end of an input

struct Input {
  std::vector<char> bytes;
  TensorPtr tensor;
};

struct Output {
  int next = -1;
  std::string file;
};

Input read_input(std::istream& ports) {
  std::string file;
  int type = 0;
  size_t rank = 0;
  ports >> file >> type >> rank;
  std::vector<executorch::aten::SizesType> sizes(rank);
  for (auto& size : sizes) ports >> size;
  std::ifstream data(file, std::ios::binary);
  Input input;
  input.bytes.assign(std::istreambuf_iterator<char>(data), {});
  input.bytes.resize(input.bytes.size() + kBeyond);
  input.tensor = executorch::extension::from_blob(
      input.bytes.data(), std::move(sizes), static_cast<executorch::aten::ScalarType>(type));
  return input;
}

int fail(const std::string& what, Error error) {
  std::cerr << what << " failed: " << executorch::runtime::to_string(error) << "\n";
  return 1;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) return 2;
  std::ifstream ports(arguments[2]);
  size_t inputs_count = 0, outputs_count = 0;
  ports >> inputs_count;
  std::vector<Input> inputs;
  for (size_t at = 0; at < inputs_count; ++at) inputs.push_back(read_input(ports));
  ports >> outputs_count;
  std::vector<Output> outputs(outputs_count);
  for (auto& output : outputs) ports >> output.next >> output.file;

  Module module(arguments[1]);
  if (const Error error = module.load(); error != Error::Ok) return fail("load", error);
  std::vector<EValue> given;
  for (const Input& input : inputs) given.emplace_back(input.tensor);
  const int steps = std::stoi(arguments[3]);
  for (int step = 1; step <= steps; ++step) {
    auto found = module.execute("forward", given);
    if (!found.ok()) return fail("execute", found.error());
    for (size_t at = 0; at < outputs.size(); ++at) {
      const auto& tensor = found.get()[at].toTensor();
      if (outputs[at].next >= 0) {
        std::memcpy(inputs[outputs[at].next].bytes.data(), tensor.const_data_ptr(), tensor.nbytes());
      }
      if (step == steps) {
        std::ofstream file(outputs[at].file, std::ios::binary);
        file.write(static_cast<const char*>(tensor.const_data_ptr()), static_cast<std::streamsize>(tensor.nbytes()));
      }
    }
  }
  return 0;
}
