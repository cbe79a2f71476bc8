// Runs an AOTInductor package that holds kvq operators, without Python:
//   run_package model.pt2 inputs.pt outputs.pt [times]
// inputs.pt is a list of tensors from torch.save; outputs.pt gets those of the last run, for torch.load.
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>

int main(int argc, char** argv) {
  if (argc < 4) {
    std::cerr << "usage: " << argv[0] << " model.pt2 inputs.pt outputs.pt [times]\n";
    return 2;
  }
  try {
    std::ifstream file(argv[2], std::ios::binary);
    const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    std::vector<at::Tensor> inputs;
    const c10::IValue loaded = torch::jit::pickle_load(bytes);
    for (const c10::IValue& value : loaded.toListRef()) inputs.push_back(value.toTensor());
    torch::inductor::AOTIModelPackageLoader model(argv[1]);
    std::vector<at::Tensor> outputs;
    for (int left = argc > 4 ? std::atoi(argv[4]) : 1; left > 0; --left) outputs = model.run(inputs);
    const std::vector<char> saved = torch::jit::pickle_save(c10::IValue(outputs));
    std::ofstream(argv[3], std::ios::binary).write(saved.data(), std::streamsize(saved.size()));
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}
