// org.edgefl.Native: the C interface of the agent for Java. No C++ exception leaves it, and none of Java's enters the agent.
#include <jni.h>

#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "edgefl_agent.h"

namespace {

JavaVM* vm = nullptr;
jclass exception_class = nullptr;
jmethodID exception_init = nullptr, agent_told = nullptr, source_read = nullptr;
jobject native_order = nullptr;
jmethodID buffer_order = nullptr;

// A thread of the agent that calls Java stays attached until it ends.
struct Attached {
  JNIEnv* env = nullptr;
  bool ours = false;
  Attached() {
    if (vm->GetEnv(reinterpret_cast<void**>(&env), JNI_VERSION_1_6) == JNI_OK) return;
#ifdef __ANDROID__
    ours = vm->AttachCurrentThreadAsDaemon(&env, nullptr) == JNI_OK;
#else
    ours = vm->AttachCurrentThreadAsDaemon(reinterpret_cast<void**>(&env), nullptr) == JNI_OK;
#endif
    if (!ours) env = nullptr;
  }
  ~Attached() {
    if (ours) vm->DetachCurrentThread();
  }
};

JNIEnv* env_here() {
  thread_local Attached attached;
  return attached.env;
}

// Local references that are made within the block go with it: a thread of the agent never returns to Java.
struct Frame {
  JNIEnv* env;
  explicit Frame(JNIEnv* of) : env(of->PushLocalFrame(16) == 0 ? of : nullptr) {}
  ~Frame() {
    if (env != nullptr) env->PopLocalFrame(nullptr);
  }
};

struct Global {
  jobject object;
  Global(JNIEnv* env, jobject local) : object(env->NewGlobalRef(local)) {}
  Global(const Global&) = delete;
  ~Global() {
    if (JNIEnv* env = env_here()) env->DeleteGlobalRef(object);
  }
};

struct Handle {
  edgefl_agent* agent = nullptr;
  std::unique_ptr<Global> told;
};

jbyteArray bytes_of(JNIEnv* env, const char* text) {
  const std::string plain = text == nullptr ? "" : text;
  jbyteArray made = env->NewByteArray(static_cast<jsize>(plain.size()));
  if (made != nullptr) {
    env->SetByteArrayRegion(made, 0, static_cast<jsize>(plain.size()), reinterpret_cast<const jbyte*>(plain.data()));
  }
  return made;
}

// Bytes with a zero behind them, or null.
struct Text {
  std::vector<char> bytes;
  Text(JNIEnv* env, jbyteArray array) {
    if (array == nullptr) return;
    bytes.resize(static_cast<size_t>(env->GetArrayLength(array)));
    env->GetByteArrayRegion(array, 0, static_cast<jsize>(bytes.size()), reinterpret_cast<jbyte*>(bytes.data()));
  }
  const char* get() const { return bytes.empty() ? nullptr : bytes.data(); }
};

std::vector<Text> texts_of(JNIEnv* env, jobjectArray array) {
  std::vector<Text> texts;
  const jsize count = env->GetArrayLength(array);
  for (jsize at = 0; at < count; ++at) {
    auto each = static_cast<jbyteArray>(env->GetObjectArrayElement(array, at));
    texts.emplace_back(env, each);
    if (each != nullptr) env->DeleteLocalRef(each);
  }
  return texts;
}

std::vector<const char*> pointers_of(const std::vector<Text>& texts) {
  std::vector<const char*> pointers;
  for (const Text& text : texts) pointers.push_back(text.get());
  return pointers;
}

void throw_error(JNIEnv* env, int status, const char* text) {
  if (env->ExceptionCheck()) return;
  jbyteArray message = bytes_of(env, text);
  if (message == nullptr) return;  // out of memory, which is thrown already
  jobject error = env->NewObject(exception_class, exception_init, static_cast<jint>(status), message);
  if (error != nullptr) env->Throw(static_cast<jthrowable>(error));
}

bool checked(JNIEnv* env, edgefl_status status) {
  if (status == EDGEFL_OK) return true;
  throw_error(env, status, edgefl_last_error());
  return false;
}

// Runs the body of a native method; what is thrown in it is thrown in Java.
template <typename Result, typename Body>
Result guarded(JNIEnv* env, Result fallback, Body body) noexcept {
  try {
    return body();
  } catch (const std::exception& error) {
    throw_error(env, EDGEFL_ERR_INTERNAL, error.what());
  } catch (...) {
    throw_error(env, EDGEFL_ERR_INTERNAL, "something that is no error was thrown; this is a fault of edgefl");
  }
  return fallback;
}

Handle* handle_of(jlong handle) { return reinterpret_cast<Handle*>(handle); }

// An exception in a listener is the app's own affair: its handler of uncaught ones is told, and the agent goes on.
void report_exception(JNIEnv* env) {
  const jthrowable error = env->ExceptionOccurred();
  if (error == nullptr) return;
  env->ExceptionClear();
  const jclass thread = env->FindClass("java/lang/Thread");
  const jclass handler = thread ? env->FindClass("java/lang/Thread$UncaughtExceptionHandler") : nullptr;
  const jmethodID current = handler ? env->GetStaticMethodID(thread, "currentThread", "()Ljava/lang/Thread;") : nullptr;
  const jmethodID ask = current ? env->GetMethodID(thread, "getUncaughtExceptionHandler", "()Ljava/lang/Thread$UncaughtExceptionHandler;") : nullptr;
  const jmethodID tell = ask ? env->GetMethodID(handler, "uncaughtException", "(Ljava/lang/Thread;Ljava/lang/Throwable;)V") : nullptr;
  const jobject here = tell ? env->CallStaticObjectMethod(thread, current) : nullptr;
  const jobject told = !env->ExceptionCheck() && here != nullptr ? env->CallObjectMethod(here, ask) : nullptr;
  if (!env->ExceptionCheck() && told != nullptr) env->CallVoidMethod(told, tell, here, error);
  if (env->ExceptionCheck()) env->ExceptionClear();
}

void on_event(void* context, const edgefl_event* event) {
  JNIEnv* env = env_here();
  if (env == nullptr) return;
  const Frame frame(env);
  if (frame.env == nullptr) {
    env->ExceptionClear();
    return;
  }
  const jbyteArray name = bytes_of(env, event->event), text = name ? bytes_of(env, event->text) : nullptr;
  const jbyteArray json = text ? bytes_of(env, event->json) : nullptr;
  if (json != nullptr) env->CallVoidMethod(static_cast<Global*>(context)->object, agent_told, name, text, json);
  report_exception(env);
}

int read_row(void* context, size_t array, uint64_t row, void* into, size_t bytes) {
  JNIEnv* env = env_here();
  if (env == nullptr) return 1;
  const Frame frame(env);
  if (frame.env == nullptr) {
    env->ExceptionClear();
    return 1;
  }
  const jobject buffer = env->NewDirectByteBuffer(into, static_cast<jlong>(bytes));
  if (buffer != nullptr) env->CallObjectMethod(buffer, buffer_order, native_order);
  if (!env->ExceptionCheck() && buffer != nullptr) {
    env->CallVoidMethod(static_cast<Global*>(context)->object, source_read, static_cast<jint>(array), static_cast<jlong>(row), buffer);
  }
  const bool wrong = buffer == nullptr || env->ExceptionCheck();
  if (env->ExceptionCheck()) report_exception(env);
  return wrong ? 1 : 0;
}

void release_source(void* context) { delete static_cast<Global*>(context); }

jint bits_of(const edgefl_state& state) {
  return (state.connected ? 1 : 0) | (state.working ? 2 : 0) | (state.paused ? 4 : 0) | (state.done ? 8 : 0);
}

bool find_names(JNIEnv* env) {
  const jclass error = env->FindClass("org/edgefl/EdgeflException");
  if (error == nullptr) return false;
  exception_class = static_cast<jclass>(env->NewGlobalRef(error));
  exception_init = env->GetMethodID(error, "<init>", "(I[B)V");
  const jclass agent = env->FindClass("org/edgefl/Agent");
  if (agent == nullptr) return false;
  agent_told = env->GetMethodID(agent, "told", "([B[B[B)V");
  const jclass source = env->FindClass("org/edgefl/DataSource");
  if (source == nullptr) return false;
  source_read = env->GetMethodID(source, "read", "(IJLjava/nio/ByteBuffer;)V");
  const jclass order = env->FindClass("java/nio/ByteOrder"), buffer = env->FindClass("java/nio/ByteBuffer");
  if (order == nullptr || buffer == nullptr) return false;
  const jmethodID of_machine = env->GetStaticMethodID(order, "nativeOrder", "()Ljava/nio/ByteOrder;");
  const jobject found = of_machine ? env->CallStaticObjectMethod(order, of_machine) : nullptr;
  if (env->ExceptionCheck() || found == nullptr) return false;
  native_order = env->NewGlobalRef(found);
  buffer_order = env->GetMethodID(buffer, "order", "(Ljava/nio/ByteOrder;)Ljava/nio/ByteBuffer;");
  return exception_init && agent_told && source_read && native_order && buffer_order;
}

}  // namespace

extern "C" {

JNIEXPORT jint JNICALL JNI_OnLoad(JavaVM* machine, void*) {
  vm = machine;
  JNIEnv* env = nullptr;
  if (vm->GetEnv(reinterpret_cast<void**>(&env), JNI_VERSION_1_6) != JNI_OK || !find_names(env)) return JNI_ERR;
  return JNI_VERSION_1_6;
}

JNIEXPORT jlong JNICALL Java_org_edgefl_Native_create(
    JNIEnv* env, jclass, jobjectArray texts, jboolean insecure, jlong memory, jint threads, jobjectArray limits, jobjectArray mirrors,
    jboolean own_only) {
  return guarded<jlong>(env, 0, [&]() -> jlong {
    const std::vector<Text> words = texts_of(env, texts), given = texts_of(env, limits), places = texts_of(env, mirrors);
    const std::vector<const char*> keys = pointers_of(given), urls = pointers_of(places);
    edgefl_options options;
    edgefl_options_init(&options);
    const char** const fields[] = {
        &options.federation, &options.device, &options.broker, &options.folder, &options.engine, &options.tier,
        &options.server_keys, &options.token, &options.password, &options.ca_file, &options.cert_file, &options.key_file};
    for (size_t at = 0; at < sizeof(fields) / sizeof(*fields); ++at) *fields[at] = words.at(at).get();
    options.insecure_password = insecure ? 1 : 0;
    options.memory_bytes = memory > 0 ? static_cast<uint64_t>(memory) : 0;
    options.threads = threads;
    options.limits = keys.data();
    options.limit_count = keys.size();
    options.mirrors = urls.data();
    options.mirror_count = urls.size();
    options.own_mirrors_only = own_only ? 1 : 0;
    auto handle = std::make_unique<Handle>();
    if (!checked(env, edgefl_agent_create(&options, &handle->agent))) return 0;
    return reinterpret_cast<jlong>(handle.release());
  });
}

JNIEXPORT void JNICALL Java_org_edgefl_Native_destroy(JNIEnv*, jclass, jlong handle) {
  edgefl_agent_destroy(handle_of(handle)->agent);
  delete handle_of(handle);
}

JNIEXPORT void JNICALL Java_org_edgefl_Native_setEvents(JNIEnv* env, jclass, jlong handle, jobject agent) {
  guarded<int>(env, 0, [&] {
    handle_of(handle)->told = std::make_unique<Global>(env, agent);
    checked(env, edgefl_agent_set_events(handle_of(handle)->agent, on_event, handle_of(handle)->told.get()));
    return 0;
  });
}

JNIEXPORT void JNICALL Java_org_edgefl_Native_setDataPath(JNIEnv* env, jclass, jlong handle, jbyteArray path, jboolean skip) {
  guarded<int>(env, 0, [&] {
    checked(env, edgefl_agent_set_data_path(handle_of(handle)->agent, Text(env, path).get(), skip ? 1 : 0));
    return 0;
  });
}

JNIEXPORT void JNICALL Java_org_edgefl_Native_setData(
    JNIEnv* env, jclass, jlong handle, jbyteArray name, jlong rows, jobjectArray arrays, jobjectArray types, jobjectArray shapes,
    jobject source) {
  guarded<int>(env, 0, [&] {
    const std::vector<Text> names = texts_of(env, arrays), kinds = texts_of(env, types);
    std::vector<std::vector<int64_t>> sizes(names.size());
    std::vector<edgefl_array> told(names.size());
    for (size_t at = 0; at < names.size(); ++at) {
      auto shape = static_cast<jlongArray>(env->GetObjectArrayElement(shapes, static_cast<jsize>(at)));
      std::vector<jlong> plain(static_cast<size_t>(env->GetArrayLength(shape)));
      env->GetLongArrayRegion(shape, 0, static_cast<jsize>(plain.size()), plain.data());
      env->DeleteLocalRef(shape);
      sizes[at].assign(plain.begin(), plain.end());
      told[at] = {names[at].get(), kinds.at(at).get(), sizes[at].data(), sizes[at].size()};
    }
    const Text shown(env, name);
    edgefl_data_source given{};
    given.name = shown.get();
    given.rows = rows > 0 ? static_cast<uint64_t>(rows) : 0;
    given.arrays = told.data();
    given.array_count = told.size();
    given.read = read_row;
    given.release = release_source;
    given.context = new Global(env, source);
    checked(env, edgefl_agent_set_data(handle_of(handle)->agent, &given));
    return 0;
  });
}

JNIEXPORT void JNICALL Java_org_edgefl_Native_setConstraints(
    JNIEnv* env, jclass, jlong handle, jdouble duty, jboolean allowed, jbyteArray reason, jbyteArray power, jbyteArray link,
    jbyteArray thermal) {
  guarded<int>(env, 0, [&] {
    const Text why(env, reason), source(env, power), net(env, link), heat(env, thermal);
    edgefl_constraints now;
    edgefl_constraints_init(&now);
    now.duty = duty;
    now.allowed = allowed ? 1 : 0;
    now.reason = why.get();
    now.power = source.get();
    now.link = net.get();
    now.thermal = heat.get();
    checked(env, edgefl_agent_set_constraints(handle_of(handle)->agent, &now));
    return 0;
  });
}

JNIEXPORT void JNICALL Java_org_edgefl_Native_start(JNIEnv* env, jclass, jlong handle) {
  checked(env, edgefl_agent_start(handle_of(handle)->agent));
}

JNIEXPORT jint JNICALL Java_org_edgefl_Native_step(JNIEnv* env, jclass, jlong handle, jint wait_ms) {
  edgefl_state state{};
  state.size = sizeof(state);
  const uint32_t wait = wait_ms > 0 ? static_cast<uint32_t>(wait_ms) : 0;
  return checked(env, edgefl_agent_step(handle_of(handle)->agent, wait, &state)) ? bits_of(state) : 0;
}

JNIEXPORT jint JNICALL Java_org_edgefl_Native_state(JNIEnv* env, jclass, jlong handle) {
  edgefl_state state{};
  state.size = sizeof(state);
  return checked(env, edgefl_agent_state(handle_of(handle)->agent, &state)) ? bits_of(state) : 0;
}

JNIEXPORT void JNICALL Java_org_edgefl_Native_pause(JNIEnv* env, jclass, jlong handle, jboolean on) {
  checked(env, edgefl_agent_pause(handle_of(handle)->agent, on ? 1 : 0));
}

JNIEXPORT jboolean JNICALL Java_org_edgefl_Native_stop(JNIEnv* env, jclass, jlong handle, jint within_ms) {
  const uint32_t within = within_ms > 0 ? static_cast<uint32_t>(within_ms) : 0;
  const edgefl_status status = edgefl_agent_stop(handle_of(handle)->agent, within);
  return status == EDGEFL_ERR_BUSY ? JNI_FALSE : static_cast<jboolean>(checked(env, status));
}

JNIEXPORT jbyteArray JNICALL Java_org_edgefl_Native_version(JNIEnv* env, jclass) {
  return guarded<jbyteArray>(env, nullptr, [&] { return bytes_of(env, edgefl_version()); });
}

}  // extern "C"
