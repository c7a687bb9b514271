// The service manager that started this process, if it asked for messages (sd_notify(3)).
#pragma once

#include <string>

namespace edgefl {

// Without NOTIFY_SOCKET its methods do nothing. Thread-safe.
class ServiceManager {
 public:
  ServiceManager();  // removes the manager's variables from the environment
  ~ServiceManager();
  ServiceManager(const ServiceManager&) = delete;
  ServiceManager& operator=(const ServiceManager&) = delete;

  void send(const std::string& text) const;  // "READY=1", "STATUS=...", lines of assignments
  void keep_alive();                         // feeds the watchdog, several times in its interval; from one thread

 private:
  int socket_ = -1;
  double interval_s_ = 0, fed_at_ = -1e9;  // 0: no watchdog
};

}  // namespace edgefl
