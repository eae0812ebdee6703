"""Tell who the driver is and what it can do: the Identity service, and the registration with the kubelet. Any thread.

With `--register` the driver does itself what the sidecar `node-driver-registrar` is for elsewhere. The kubelet watches
its folder `plugins_registry`: a socket that appears is asked for `GetInfo`, one that goes is deregistered. Beside an
older driver's the socket takes its place in one step (`server`), so a rolling upgrade is never deregistered.
"""

from __future__ import annotations

import logging

from google.protobuf.wrappers_pb2 import BoolValue

import datacache
from csi_driver import DRIVER_NAME
from csi_driver.wire import csi_pb2 as csi
from csi_driver.wire import registration_pb2 as wire


class IdentityService:
    """The Identity service: the same in all modes, as it speaks for the driver as a whole."""

    def GetPluginInfo(self, _request: csi.GetPluginInfoRequest) -> csi.GetPluginInfoResponse:
        return csi.GetPluginInfoResponse(name=DRIVER_NAME, vendor_version=datacache.__version__)

    def GetPluginCapabilities(self, _request: csi.GetPluginCapabilitiesRequest) -> csi.GetPluginCapabilitiesResponse:
        service, expansion = csi.PluginCapability.Service, csi.PluginCapability.VolumeExpansion
        return csi.GetPluginCapabilitiesResponse(
            capabilities=[
                csi.PluginCapability(service=service(type=service.CONTROLLER_SERVICE)),
                csi.PluginCapability(volume_expansion=expansion(type=expansion.ONLINE)),
            ]
        )

    def Probe(self, _request: csi.ProbeRequest) -> csi.ProbeResponse:
        # Ready as soon as it answers. A catalog or a store that is away is no reason to be restarted for.
        return csi.ProbeResponse(ready=BoolValue(value=True))


_log = logging.getLogger("csi_driver.identity")


class RegistrationService:
    """The service `pluginregistration.Registration`. Its methods are the RPCs."""

    def __init__(self, endpoint: str) -> None:
        """Take `endpoint`, the path of the driver's socket as the kubelet sees it."""
        self._endpoint = endpoint

    def GetInfo(self, _request: wire.InfoRequest) -> wire.PluginInfo:
        # The versions are those of the kubelet's interface, not of the driver or of CSI's latest.
        return wire.PluginInfo(
            type="CSIPlugin", name=DRIVER_NAME, endpoint=self._endpoint, supported_versions=["1.0.0"]
        )

    def NotifyRegistrationStatus(self, request: wire.RegistrationStatus) -> wire.RegistrationStatusResponse:
        if request.plugin_registered:
            _log.info("the kubelet has registered the driver")
        else:
            _log.error("the kubelet does not register the driver: %s", request.error)
        return wire.RegistrationStatusResponse()
