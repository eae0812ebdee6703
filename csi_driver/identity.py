"""The Identity service: who the driver is and what it can do. Any thread."""

from __future__ import annotations

from typing import Any

from google.protobuf.wrappers_pb2 import BoolValue

import datacache
from csi_driver import DRIVER_NAME
from csi_driver.wire import csi_pb2 as csi


class IdentityService:
    """The same in all modes: what the driver as a whole can do."""

    def GetPluginInfo(self, _request: csi.GetPluginInfoRequest, _context: Any) -> csi.GetPluginInfoResponse:  # noqa: N802
        return csi.GetPluginInfoResponse(name=DRIVER_NAME, vendor_version=datacache.__version__)

    def GetPluginCapabilities(  # noqa: N802
        self, _request: csi.GetPluginCapabilitiesRequest, _context: Any
    ) -> csi.GetPluginCapabilitiesResponse:
        service, expansion = csi.PluginCapability.Service, csi.PluginCapability.VolumeExpansion
        return csi.GetPluginCapabilitiesResponse(
            capabilities=[
                csi.PluginCapability(service=service(type=service.CONTROLLER_SERVICE)),
                csi.PluginCapability(volume_expansion=expansion(type=expansion.ONLINE)),
            ]
        )

    def Probe(self, _request: csi.ProbeRequest, _context: Any) -> csi.ProbeResponse:  # noqa: N802
        # Ready as soon as it answers. A catalog or a store that is away is no reason to be restarted for.
        return csi.ProbeResponse(ready=BoolValue(value=True))
